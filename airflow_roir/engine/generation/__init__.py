"""One generation of an index: its entries, its physical tables, their cut into segments, and their end."""
