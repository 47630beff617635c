-- The states of a delta's rows: airflow_roir/entry_state.py says what each is.
CREATE TYPE roir.entry_state AS ENUM ('regular', 'antimatter', 'ghost');
