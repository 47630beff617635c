"""What the operators stand on: a task that drives an operation, pauses with the switch and follows the form."""
