"""How a task reaches PostgreSQL and Spark through Airflow's connections."""
