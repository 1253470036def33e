"""The model families: one file each, both ways."""
