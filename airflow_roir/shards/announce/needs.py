"""What a shard lacks so that its server can announce writes, before there is anything to announce (`roir plan`)."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.errors import RoirError
from airflow_roir.shards.announce import foreign
from airflow_roir.shards.copy.survey import ShardPlan, Survey
from airflow_roir.shards.shard import Lane


def by_server(index_server: Database, found: Survey) -> dict[str, list[str]]:
    """For each shard what `roir announce --by server` needs there, as sentences. Changes nothing."""
    return {one.shard.name: list(_needs(index_server, one)) for one in found.shards}


def _needs(index_server: Database, one: ShardPlan) -> list[str]:
    lane = Lane(0, 0, one.shard, "", one.source.oid)
    needs = []
    try:
        foreign.connection_of(lane)
    except RoirError as error:
        needs.append(str(error))
    try:
        with one.shard.database(index_server.application_name, index_server.limits).transaction() as connection:
            foreign.check_extension(connection, lane, one.source)
    except RoirError as error:
        needs.append(str(error))
    except DBAPIError as error:
        needs.append(f"shard {quote(one.shard.name)} can't be looked at: {reason_of(error)}")
    return needs
