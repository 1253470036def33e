"""Starting jobs: the command line, hosts, launcher commands and the local process manager.

Nothing in here imports torch or deepspeed: the parent of a job has to be up in a fraction of a second.
"""
