"""Reads rows through an index from SQLAlchemy. It needs neither Airflow nor Spark.

`rows`: from a table in the database of the index. `ShardedIndex`: from tables on other servers, at a chosen level of
consistency (docs/shards.md#read).
"""

from __future__ import annotations

from airflow_roir.reading.local import rows as rows
from airflow_roir.reading.sharded import Answer as Answer
from airflow_roir.reading.sharded import Found as Found
from airflow_roir.reading.sharded import ShardedIndex as ShardedIndex
