"""Text generation on any tensor x pipeline layout, without the training engine."""
