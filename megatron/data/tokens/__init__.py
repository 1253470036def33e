"""Token files: `.bin`/`.idx` pairs and `.npy`, their manifests, index caches, verifying and merging."""
