"""Hugging Face folders, read as they are."""
