"""Optimizers, their parameter groups, and learning-rate schedules."""
