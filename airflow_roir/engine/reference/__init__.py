"""Foreign keys to the key of a unique index (docs/unique.md#foreign-keys)."""
