"""The base of the operators: a task that drives an operation, pauses with the DAG's switch and follows the form."""
