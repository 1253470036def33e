"""Which samples a run reads, in which order: sources, splits, mixtures, phases, caps."""
