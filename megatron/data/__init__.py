"""From documents on disk to the batch of a step: datasets, packing, mixtures, loaders (layer 3)."""
