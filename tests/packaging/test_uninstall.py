"""docs/uninstall.md does what it says: its blocks for the database run in their order, and leave the table alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from servers.postgres import embedded_postgres
from tests.packaging.page_script import run_script

PAGE = Path(__file__).parents[2] / "docs" / "uninstall.md"
TABLE = """
CREATE DATABASE app;
\\connect app
CREATE ROLE shop_owner;
CREATE SCHEMA shop AUTHORIZATION shop_owner;
SET ROLE shop_owner;
CREATE TABLE shop.orders (id bigint, ordered_at date, customer_id int, status text, number text,
                          PRIMARY KEY (id, ordered_at)) PARTITION BY RANGE (ordered_at);
CREATE TABLE shop.orders_2026 PARTITION OF shop.orders FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
INSERT INTO shop.orders SELECT i, '2026-01-01', i, 'paid', i FROM generate_series(1, 2000) AS i;
"""
# The last line leaves an unfinished rebuild.
BEFORE = """
roir role-sql builder --schema shop --tables shop.orders | psql --dbname app
roir init
psql --dbname app --command 'SELECT roir.guard()'
roir build shop.orders_by_customer --table shop.orders --keys customer_id --include status --without-spark
roir build shop.orders_by_number --table shop.orders --keys number --unique --without-spark
roir build shop.orders_by_number --without-spark --max-duration 1s --max-rows-per-second 100 || [ $? = 3 ]
"""
LEFT = """
SELECT (SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'roir%'), (SELECT count(*) FROM pg_event_trigger),
       (SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal),
       (SELECT count(*) FROM pg_roles WHERE rolname = 'builder'), (SELECT count(*) FROM shop.orders)
"""


def as_script(page: str) -> str:
    """The steps in the database as one shell script: SQL goes to a superuser's psql."""
    script = ["set -ex", f"psql <<'END'{TABLE}END", BEFORE]
    for language, block in re.findall(
        r"^```(sh|sql)\n(.*?)^```$", page[: page.index("## 5.")], re.MULTILINE | re.DOTALL
    ):
        script.append(block if language == "sh" else f"psql --dbname app -v ON_ERROR_STOP=1 <<'END'\n{block}END")
    return "\n".join([*script, f'psql --dbname app -At --command "{LEFT}"'])


@pytest.mark.by_hand("sweeps")
def test_the_page_leaves_nothing_but_the_table(tmp_path: Path) -> None:
    with embedded_postgres(18) as dsn:
        host = dsn.split("host=")[1]
        environment = {"PGHOST": host, "PGUSER": "postgres", "ROIR_DSN": f"host={host} user=builder dbname=app"}
        said = run_script(as_script(PAGE.read_text()), tmp_path, environment, 600, "-o", "pipefail")
    assert "is aborted" in said
    assert "no index yet" in said
    assert said.splitlines()[-1] == "0|0|0|0|2000"
