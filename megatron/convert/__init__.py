"""Conversion of models, both ways: one file per family (`families`), streamed, and compared before it is published."""
