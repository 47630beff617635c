"""The source table: its shape in the catalogs, its owner, its files, and the reasons that refuse an index."""
