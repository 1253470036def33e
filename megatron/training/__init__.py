"""Runs: setting up a process, the engine, the loop and its callbacks."""
