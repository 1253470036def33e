"""Deepy's library. Packages are layered: imports only go down (tests/test_architecture.py holds the table)."""
