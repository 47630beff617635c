"""Finds faults of published indexes, and of roir's own relations, while no operation works on them."""
