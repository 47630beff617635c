"""All that is shown of an operation or an index, read once: what every surface renders."""
