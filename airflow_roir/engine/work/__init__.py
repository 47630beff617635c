"""A phase at work: its pieces, its workers, and the pool that runs them."""
