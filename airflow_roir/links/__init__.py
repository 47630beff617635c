"""Buttons that a task of ours shows in Airflow's UI."""
