"""What is wrong with published indexes, and with roir's own relations, while nothing is done to them."""
