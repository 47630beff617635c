"""The work of a phase: its pieces, its workers, and the pool that runs them."""
