"""`python -m airflow_roir.cli`, also by a command that starts others, and ends them with itself."""

from airflow_roir.cli import main
from airflow_roir.spark import guard

guard.begin()
main()
