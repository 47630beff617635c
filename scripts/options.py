"""Writes what is made from airflow_roir/options.py: `make options`. A test compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from airflow_roir.options import LIVE, Kind, Option, VerifyOptions, options_of  # noqa: E402 - found by the path above

SQL = """\
-- The options that change while an operation lives, made from airflow_roir/options.py by `make options`: edit that.

-- Each is a column of the operation's row.
ALTER TABLE roir.operation
    {columns};

-- What users may ask for. nothing: what 0, or `off`, stands for; then the column is NULL. of_builds: no verification
-- and no compaction has it. apart: only an index over shards has it.
CREATE FUNCTION roir.live_options()
RETURNS TABLE (ordinal integer, name text, lowest integer, highest integer, nothing text,
               of_builds boolean, apart boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES {rows}
$$;

-- What change_options has made of an operation's row is written, with what the governor grants and the notice.
CREATE FUNCTION roir.write_options(o roir.operation) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.operation x
       SET {sets},
           granted = o.granted, granted_at = o.granted_at, notice = o.notice
     WHERE x.id = o.id AND x.status IN ('running', 'paused')
$$;

-- Changes a live operation's options, whoever drives it, running or paused.
CREATE FUNCTION roir.change(index text,
                            {parameters},
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_change(index, jsonb_build_object(
        {wishes}), actor);
END $$;

-- paused -> running, for a run that waits for it (a DAG run goes on by itself), with other options where given.
CREATE FUNCTION roir.resume(index text,
                            {parameters},
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_resume(index, jsonb_build_object(
        {wishes}), actor);
END $$;
"""


def live_options_sql() -> str:
    """migrations/sql/live_options.sql."""
    everywhere = {one.name for one in options_of(VerifyOptions)}
    options = list(LIVE.values())
    return SQL.format(
        columns=",\n    ".join(map(_column, options)),
        rows=",\n           ".join(_row(place, one, one.name in everywhere) for place, one in enumerate(options, 1)),
        sets=_wrapped((f"{name} = o.{name}" for name in LIVE), 11),
        parameters=_wrapped((f"{one.name} {_type(one)} DEFAULT NULL" for one in options), 28),
        wishes=_wrapped((f"'{name}', {name}" for name in LIVE), 8),
    )


def _type(option: Option) -> str:
    return "text" if option.kind.is_text else "integer"


def _column(option: Option) -> str:
    if option.kind is Kind.LIMITS:
        return f"ADD {option.name} jsonb NOT NULL DEFAULT '{{}}'"
    if option.kind.is_text:
        return f"ADD {option.name} text"
    sort = "integer" if option.zero else "integer NOT NULL"
    if option.begins is not None and not option.zero:
        sort += f" DEFAULT {option.begins}"
    return f"ADD {option.name} {sort} CHECK ({option.name} BETWEEN {option.least} AND {option.most})"


def _row(place: int, option: Option, everywhere: bool) -> str:
    bounds = "NULL, NULL" if option.kind.is_text else f"{option.least_asked}, {option.most}"
    none = f"'{option.none}'" if option.none else "NULL"
    return f"({place}, '{option.name}', {bounds}, {none}, {str(not everywhere).lower()}, {str(option.apart).lower()})"


def _wrapped(parts: Iterator[str], indent: int) -> str:
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) + indent + 1 <= 118:
            lines[-1] = joined
        else:
            lines.append(part)
    return (",\n" + " " * indent).join(lines)


def files() -> dict[Path, str]:
    """Every file with what belongs into it."""
    return {ROOT / "migrations" / "sql" / "live_options.sql": live_options_sql()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
