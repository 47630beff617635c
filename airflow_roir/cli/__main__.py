"""`python -m airflow_roir.cli`."""

from airflow_roir.cli import main

main()
