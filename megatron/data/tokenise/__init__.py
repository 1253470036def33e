"""From text to token files: readers of corpora, encoders, worker processes, resuming."""
