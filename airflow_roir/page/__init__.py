"""The pages *Index build* and *Indexes* in Airflow's UI: a FastAPI app, registered as an Airflow plugin."""
