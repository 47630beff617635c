"""How far one operation is, its pieces, and what holds it up: for its page and for --watch."""
