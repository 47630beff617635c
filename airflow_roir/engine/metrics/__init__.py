"""The metrics that monitoring asks for."""
