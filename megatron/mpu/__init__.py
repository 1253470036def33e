"""Model parallelism: rank arithmetic, process groups, sharded parameters, and the layers that use them.

Nothing is imported here: `topology` is needed where torch is not wanted.
"""
