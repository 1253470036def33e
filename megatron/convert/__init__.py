"""Conversion to Hugging Face: one table of names and transforms per model family, streamed and checked."""
