"""The demonstration: a real index over real data, built by a real Airflow while a writer goes on. `make demo`."""
