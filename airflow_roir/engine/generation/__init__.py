"""One generation of an index: its entries, its physical tables, how they are cut, and how they are dropped."""
