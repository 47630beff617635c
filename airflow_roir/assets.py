"""The Airflow asset of an index, by which other DAGs follow its rebuilds.

from airflow_roir.assets import index_asset

@dag(schedule=[index_asset("shop.orders_by_customer", "warehouse")])
"""

from __future__ import annotations

from urllib.parse import SplitResult, quote

from airflow.sdk import Asset, AssetAlias

from airflow_roir.definition import parse_name

SCHEME = "roir"
# An alias, since a run's index is only known when it runs, but an operator's outlets when the DAG is parsed. A DAG can
# also follow every index by it.
PUBLISHED = "roir_index_published"


def published_alias() -> AssetAlias:
    """The alias that every publication of any index is reported to."""
    return AssetAlias(PUBLISHED)


def index_uri(index: str, postgres_conn_id: str = "postgres_default") -> str:
    """The asset's URI, `roir://CONNECTION/SCHEMA/INDEX`, each part percent-encoded.

    index: an SQL identifier, quoted or not; without a schema it counts as one in `public`.
    postgres_conn_id: the Airflow connection through which the index is built, which identifies the database.
    Raises InvalidInput for a text that is no identifier.
    """
    name = parse_name(index, "index")
    parts = (postgres_conn_id, name.schema or "public", name.name)
    return f"{SCHEME}://" + "/".join(quote(part, safe="") for part in parts)


def index_asset(index: str, postgres_conn_id: str = "postgres_default") -> Asset:
    """The asset of one index, for `schedule=[…]`; see `index_uri` for the parameters."""
    uri = index_uri(index, postgres_conn_id)
    return Asset(name=uri, uri=uri, group="index")


def normalize_uri(uri: SplitResult) -> SplitResult:
    """Checks the shape of a `roir://` URI for Airflow. Raises ValueError, as Airflow expects of a handler."""
    if not uri.netloc or len(uri.path.split("/")) != 3 or not all(uri.path.split("/")[1:]):
        raise ValueError(f"an index's URI is {SCHEME}://CONNECTION/SCHEMA/INDEX, not {uri.geturl()!r}")
    return uri._replace(query="", fragment="")
