"""Runs that are killed at random moments and started again must end as if nothing had happened."""
