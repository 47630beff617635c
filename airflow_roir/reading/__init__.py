"""Reads tables on other servers through an index from SQLAlchemy, at a chosen level of consistency.

It needs neither Airflow nor Spark (docs/shards.md#read). `roir_client.rows` reads a table in the index's database.
"""

from __future__ import annotations

from airflow_roir.reading.sharded import Answer as Answer
from airflow_roir.reading.sharded import Found as Found
from airflow_roir.reading.sharded import ShardedIndex as ShardedIndex
