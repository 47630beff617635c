"""The engine: PostgreSQL only, one file per phase. It knows neither Airflow nor Spark."""
