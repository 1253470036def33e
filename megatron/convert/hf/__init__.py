"""Hugging Face folders: read, written, run, imported and exported."""
