"""New runs from a folder of text: a model of a size, and training that fits size, data and machine."""
