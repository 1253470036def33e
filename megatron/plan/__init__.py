"""The dry run: what a run would do, worked out from the config and the files it names. Imports no torch."""
