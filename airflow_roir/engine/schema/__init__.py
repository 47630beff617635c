"""The control schema: its version, its rights, and the marks by which changes of others are found."""
