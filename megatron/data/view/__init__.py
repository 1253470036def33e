"""Tokens as people look at them: in the terminal, as JSON, as a page."""
