"""Rows that share a key of a unique index: finds, reports and lists them."""
