"""What a run does besides stepping: logs, trackers, checkpoints, evaluation, health; and the run that uses them."""
