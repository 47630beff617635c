"""The meaning of errors, the waits for them to pass, and the lines that say so."""
