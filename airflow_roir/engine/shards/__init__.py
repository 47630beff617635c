"""An index apart from its source: one index on a server of its own, over tables in several servers."""
