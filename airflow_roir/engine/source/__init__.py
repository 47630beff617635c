"""The table that is indexed: its shape in the catalogs, its owner, its files, and what speaks against indexing it."""
