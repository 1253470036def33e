"""Hugging Face datasets, ready for training in one command."""
