"""Connects tasks to PostgreSQL and Spark through Airflow's connections."""
