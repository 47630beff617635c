"""Indexes over the tables of several servers."""
