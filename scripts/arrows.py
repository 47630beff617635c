"""Writes the triggers that refuse what is no arrow of the code's lifecycles: `make arrows`. A test compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from airflow_roir.generation_state import ARROWS, STATE_COLUMNS  # noqa: E402 - found by the path above
from airflow_roir.operation import ORDER, PLACED, TRANSITIONS, Placed  # noqa: E402

SQL = """\
-- The state machines of the control tables, made from airflow_roir/operation.py and airflow_roir/generation_state.py by
-- `make arrows`: edit those. CHECKs hold the states that exist; these triggers hold which state may follow which, for
-- every writer. Users' statements change none of these columns. A test tries every pair of states. The other functions
-- about phases are here, too.

ALTER TABLE roir.operation
    ADD CONSTRAINT operation_phase
        CHECK (phase IN ({all_phases})),
    ADD CONSTRAINT operation_phase_of_kind
        CHECK (phase = 'done' OR (kind, phase) IN ({of_kinds}));

-- The phases of each kind in their order. copies: rows are copied or compared in it.
CREATE FUNCTION roir.phases() RETURNS TABLE (kind text, n integer, phase text, copies boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES {ordered}
$$;

-- Which part of all work each phase is taken for. Only that it grows is promised: `seconds_left` is measured. A phase
-- that isn't known raises.
CREATE FUNCTION roir.percent_of(kind text, status text, phase text, copied double precision, sealed double precision,
                                compared double precision)
RETURNS numeric LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    percent double precision;
BEGIN
    IF status = 'completed' THEN
        RETURN 100.0;
    END IF;
    CASE phase
{percents}
    END CASE;
    RETURN trunc(percent::numeric, 1);
END $$;

CREATE FUNCTION roir.arrows() RETURNS TABLE (machine text, was text, becomes text)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'operation', concat_ws(' ', a.was, p.phase), concat_ws(' ', a.becomes, p.phase)
      FROM (VALUES {in_each_phase}) AS a (was, becomes)
     CROSS JOIN unnest(ARRAY{phases}) AS p (phase)
    UNION ALL
    VALUES {others}
$$;

-- Arguments: the columns that make the state.
CREATE FUNCTION roir.refuse_arrow() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    before jsonb := to_jsonb(OLD);
    after jsonb := to_jsonb(NEW);
    state text;
    next text;
BEGIN
    SELECT string_agg(before ->> c.name, ' ' ORDER BY c.n), string_agg(after ->> c.name, ' ' ORDER BY c.n)
      INTO state, next
      FROM unnest(TG_ARGV) WITH ORDINALITY AS c (name, n);
    IF NOT EXISTS (SELECT FROM roir.arrows() a
                    WHERE a.machine = TG_TABLE_NAME AND (a.was, a.becomes) = (state, next)) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('roir.%s %s can''t go from %s to %s', TG_TABLE_NAME, OLD.id, state, next);
    END IF;
    RETURN NEW;
END $$;

{triggers}"""
TRIGGER = """\
CREATE TRIGGER arrows BEFORE UPDATE OF {columns} ON roir.{table} FOR EACH ROW
WHEN ({differs})
EXECUTE FUNCTION roir.refuse_arrow({arguments});
"""


def arrows_sql() -> str:
    """migrations/sql/arrows.sql."""
    phases = list(dict.fromkeys(one.phase.value for one in TRANSITIONS))
    # A run that takes an operation over changes no state.
    stays = [one for one in TRANSITIONS if one.phase is one.to_phase and one.status is not one.to_status]
    in_each = dict.fromkeys((one.status.value, one.to_status.value) for one in stays)
    assert {(one.status.value, one.to_status.value, one.phase.value) for one in stays} == {
        (*pair, phase) for pair in in_each for phase in phases
    }
    others = [
        ("operation", f"{one.status.value} {one.phase.value}", f"{one.to_status.value} {one.to_phase.value}")
        for one in TRANSITIONS
        if one.phase is not one.to_phase
    ]
    ordered = [
        (kind.value, n, one.phase.value, one.copies) for kind, order in ORDER.items() for n, one in enumerate(order)
    ]
    others += [(one.table, one.was, one.becomes) for one in ARROWS]
    return SQL.format(
        in_each_phase=",\n                   ".join(map(str, in_each)),
        phases=phases,
        all_phases=", ".join(f"'{phase}'" for phase in (*phases, "done")),
        of_kinds=(",\n" + " " * 51).join(str((kind, phase)) for kind, _, phase, _ in ordered),
        ordered=",\n           ".join(map(_values, ordered)),
        percents="\n".join(map(_percent, PLACED.values())),
        others=",\n           ".join(map(str, others)),
        triggers="\n".join(_trigger(table, columns) for table, columns in STATE_COLUMNS.items()),
    )


def _values(row: tuple[str, int, str, bool]) -> str:
    kind, n, phase, copies = row
    return f"('{kind}', {n}, '{phase}', {str(copies).lower()})"


def _percent(one: Placed) -> str:
    grown = f" + {one.grows} * {one.done}" if one.done else ""
    return f"        WHEN '{one.phase.value}' THEN percent := {one.percent}{grown};"


def _trigger(table: str, columns: tuple[str, ...]) -> str:
    return TRIGGER.format(
        table=table,
        columns=", ".join(columns),
        differs=" OR ".join(f"OLD.{column} <> NEW.{column}" for column in columns),
        arguments=", ".join(f"'{column}'" for column in columns),
    )


def files() -> dict[Path, str]:
    """Every file with what belongs into it."""
    return {ROOT / "migrations" / "sql" / "arrows.sql": arrows_sql()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
