"""Resumable online index builds for PostgreSQL, run by Airflow, on Spark."""

__version__ = "0.1.0"
