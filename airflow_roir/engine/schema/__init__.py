"""The control schema: its version, its installation and its rights; what a restore or a user did to it."""
