"""How the rows of a source are read: in which order, in which batches, for several operations at once."""
