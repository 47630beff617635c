"""Shards, each an Airflow connection, and how many rows each has."""

from __future__ import annotations

ORDERS, ORDERS_EACH = ("orders_0", "orders_1"), 10_000
