"""The governor: reads signals of the server, and lets an operation work as hard as they allow."""
