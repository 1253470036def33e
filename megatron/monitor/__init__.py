"""Runs and jobs from outside: what they do, how far they are, what is wrong with them."""
