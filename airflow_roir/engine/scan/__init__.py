"""Reads the rows of a source: in which order, in which batches, for several operations at once."""
