"""Checkpoints: names on disk, atomic save, load at any layout, retention, cadence, lock."""
