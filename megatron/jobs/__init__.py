"""Jobs on a SLURM cluster: submitting them, what runs inside them before and around the ranks, and their chains."""
