"""The Spark job: workers that claim ranges and segments and call the engine. It doesn't know Airflow."""
