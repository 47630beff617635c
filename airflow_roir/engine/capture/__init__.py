"""The capture of a source's writes: its triggers and functions."""
