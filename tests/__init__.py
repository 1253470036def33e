"""Deepy's tests; the folders mirror `megatron/`. A package: test functions are sent to other processes by name."""
