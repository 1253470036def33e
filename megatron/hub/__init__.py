"""Uploads to the Hugging Face Hub."""
