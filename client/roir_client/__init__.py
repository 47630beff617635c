"""Lets the queries of an application use global indexes of airflow-roir, without a change to any query.

It needs neither Airflow nor Spark. `roir_client.sqlalchemy` is for SQLAlchemy 2, `roir_client.django` for Django.
"""

from __future__ import annotations

__version__ = "0.1.0"
