"""Real servers on this machine, for the tests, the demonstration and the benchmarks: PostgreSQL and Airflow."""
