"""The control tables: operations, their runs and jobs, and whether an operation may work now."""
