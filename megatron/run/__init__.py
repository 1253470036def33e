"""The composition root: from a merged config to the training loop."""
