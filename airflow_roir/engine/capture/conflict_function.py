"""The text of the function and triggers behind `roir.on_conflict = 'nothing'` (docs/architecture.md#on-conflict).

A BEFORE trigger puts the row's entry as the capture does at the end of the statement, so it waits for the same
transactions, and others wait for it. If the put is refused, it is undone, and the row is skipped. Otherwise the entry
is *claimed*: it is inserted and deleted at once, so that others wait, and the capture writes it if the row comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.capture import unique_put
from airflow_roir.engine.capture.plpgsql import function, indent, literal
from airflow_roir.engine.capture.row_function import BY_INDEX, refuse_leaf_of_others, refuse_old_snapshots
from airflow_roir.engine.capture.target import CAPTURE, DIRECT, Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import is_null
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState

# The server evaluates a trigger's condition itself, and calls the function only where the setting is on.
_IS_ON = "current_setting('roir.on_conflict', true) = 'nothing'"
# Or some statement has begun while it was on.
_IS_OPEN = "current_setting('roir.open', true) <> ''"


def conflict_function_name(source_oid: int) -> str:
    """The function of a source's rows and statements. It runs as the source's owner, as the capture does."""
    return f"{DATA_SCHEMA}.conflict_{source_oid}"


def conflict_triggers(source: Source, levels: Sequence[str]) -> list[tuple[str, int, str]]:
    """The triggers: each one's relation, `tgtype`, and what CREATE TRIGGER says of it.

    levels: the source, and those of its partitions that have partitions. An UPDATE of one of these can move rows.
    """

    def name(what: str) -> str:
        # Triggers fire by name, and ~ sorts behind all letters: the row is the one that the others leave.
        return f'"~roir_{what}_{source.oid}"'

    found = [
        (source.sql, 7, f"{name('conflict')} BEFORE INSERT ON {source.sql} FOR EACH ROW WHEN ({_IS_ON})"),
    ]
    for level in levels:
        each = f"INSERT OR UPDATE ON {level} FOR EACH STATEMENT WHEN"
        found += [
            (level, 22, f"{name('begins')} BEFORE {each} ({_IS_ON} OR {_IS_OPEN})"),
            (level, 20, f"{name('ends')} AFTER {each} ({_IS_OPEN})"),
        ]
    return found


def render_conflict(source: Source, generations: Sequence[Target], generated: Collection[str]) -> str:
    """The whole CREATE FUNCTION statement. generated: as of `conflict_body`."""
    return function(conflict_function_name(source.oid), conflict_body(source, generations, generated), BY_INDEX)


def conflict_body(source: Source, generations: Sequence[Target], generated: Collection[str]) -> str:
    """The function's body. generated: the source's generated columns, which have no values yet in a BEFORE trigger."""
    targets = [one for one in generations if _can_claim(one, generated)]
    declarations = [
        "DECLARE",
        "  one_snapshot boolean :=",
        "    current_setting('transaction_isolation') IN ('repeatable read', 'serializable');",
        "  careful boolean := true;",
        "  holder record;",
        "  held boolean;",
        "  claimed record;",
        "  passed jsonb;",
        "  refused_by text;",
    ]
    statements = [
        "IF TG_LEVEL = 'STATEMENT' THEN",
        "  IF TG_WHEN = 'BEFORE' THEN",
        f"    PERFORM roir.statement_begins({source.oid}, TG_OP);",
        "  ELSE",
        f"    PERFORM roir.statement_ends({source.oid}, TG_OP);",
        "  END IF;",
        "  RETURN NULL;",
        "END IF;",
        *(_skip_or_claim(source, targets) if targets else []),
        "RETURN NEW;",
    ]
    return "\n".join([*declarations, "BEGIN", *indent(statements), "END"])


def _can_claim(target: Target, generated: Collection[str]) -> bool:
    entry = target.entry
    known = entry.condition is None and not any(
        entry.columns[i].call or entry.columns[i].source in generated for i in entry.identity_positions
    )
    return entry.enforced and target.mode != CAPTURE and known


def _skip_or_claim(source: Source, targets: Sequence[Target]) -> list[str]:
    names = ", ".join(literal(one.constraint) for one in targets)
    me = literal(f"{conflict_function_name(source.oid)}()")
    return [
        f"IF NOT roir.may_skip({source.oid}) THEN",
        "  RETURN NEW;",
        "END IF;",
        *(refuse_leaf_of_others() if source.partitioned else []),
        "BEGIN",
        *indent(_refuse_same_row(source, targets[0])),
        *(line for one in targets for line in indent(_claim(source, one))),
        # The rollback to here also releases the lock on the row that has the key.
        "EXCEPTION WHEN unique_violation THEN",
        "  GET STACKED DIAGNOSTICS refused_by = CONSTRAINT_NAME;",
        f"  IF refused_by IN ({names}) AND roir.watches_updates(TG_RELID, {me}::regprocedure) THEN",
        "    RETURN NULL;",
        "  END IF;",
        "END;",
    ]


def _refuse_same_row(source: Source, target: Target) -> list[str]:
    """Refuses a row whose primary key another row has: it won't come, so it must claim nothing."""
    entry = target.entry
    positions = [i for i in entry.identity_positions if entry.columns[i].primary_key]

    def same_row(of: Sequence[str]) -> str:
        same = (entry.same_column(i, of[i], entry.columns[i].parameter(n)) for n, i in enumerate(positions, start=1))
        return " AND ".join(same)

    return [
        *unique_put.look(source, target, same_row, ", ".join(entry.columns[i].of("NEW") for i in positions)),
        "IF held THEN",
        f"  RAISE unique_violation USING CONSTRAINT = {literal(target.constraint)};",
        "END IF;",
    ]


def _claim(source: Source, target: Target) -> list[str]:
    """Refuses the row if its key is another row's; else makes others who put the key wait for our transaction's end.

    It leaves no entry: the capture puts that if the row comes. In the order of `unique_put`, waiting where that waits.
    """
    entry, base = target.entry, physical.base(target.generation_id)
    names, values = entry.physical(entry.identity_positions), entry.source_columns("NEW")[: entry.identity]
    arbiter = ", ".join(entry.physical(entry.key_positions))
    key = unique_put.key_is(target, "NEW", "b.")
    holder = ", ".join(entry.physical(entry.rest_positions, prefix="b."))
    ask = unique_put.ask(source, target, "NEW")
    rest = ", ".join(f"format('%s', {entry.columns[i].of('NEW')})" for i in entry.rest_positions)
    lines = [
        f"-- generation {target.generation_id}, {target.mode} mode",
        *refuse_old_snapshots(target),
        *_of_this_statement(source, target),
        *(_of_delta(source, target) if target.mode == DIRECT else []),
        "LOOP",
        f"  INSERT INTO {base} ({', '.join(names)}) VALUES ({', '.join(values)})",
        f"    ON CONFLICT ({arbiter}) DO NOTHING RETURNING tableoid AS place, ctid AS spot INTO claimed;",
        "  IF FOUND THEN",
        # Those who meet it in the unique index wait for the transaction that inserted it, deleted or not.
        "    EXECUTE format('DELETE FROM %s WHERE ctid = $1', claimed.place::regclass) USING claimed.spot;",
        "    EXIT;",
        "  END IF;",
        f"  SELECT {holder} INTO holder FROM {base} b WHERE {key} LIMIT 1;",
        "  CONTINUE WHEN NOT FOUND;",
        *indent(ask),
        "  -- The entry is stale. Whoever takes it over waits for our lock.",
        f"  PERFORM FROM {base} b WHERE {key} AND {unique_put.rest_is_holder(target, 'b.')} FOR UPDATE;",
        "  IF FOUND THEN",
        "    IF NOT one_snapshot THEN",
        *indent(ask, 3),
        "    END IF;",
        "    EXIT;",
        "  END IF;",
        "END LOOP;",
        f"PERFORM roir.let_pass({source.oid}, {target.generation_id}, {_key_text(target)}, ARRAY[{rest}]);",
    ]
    if not entry.apart_positions:
        return lines
    has_null = " OR ".join(is_null(entry.columns[i].of("NEW")) for i in entry.apart_positions)
    return [f"IF NOT ({has_null}) THEN", *indent(lines), "END IF;"]


def _of_this_statement(source: Source, target: Target) -> list[str]:
    """Refuses the row if the statement itself has inserted another one with its key, whose entry is still to come."""
    entry = target.entry
    values = [entry.columns[i].parameter(n) for n, i in enumerate(entry.key_positions, start=1)]
    key = [entry.same_column(i, f"s.c{i + 1}", values[i]) for i in entry.key_positions]
    # As literals, whose type is then the column's.
    rest = [f"s.c{i + 1} {entry.columns[i].equals} %L" for i in entry.rest_positions]
    where = " AND ".join([*(one.replace("%", "%%") for one in key), *rest])
    question = f"SELECT true FROM {physical.source_view(target.generation_id)} s WHERE {where}"
    bound = ", ".join(entry.columns[i].of("NEW") for i in entry.key_positions)
    return [
        f"FOR passed IN SELECT roir.passed({source.oid}, {target.generation_id}, {_key_text(target)}) LOOP",
        f"  EXECUTE format({literal(question)}, VARIADIC ARRAY(SELECT jsonb_array_elements_text(passed)))",
        f"    INTO held USING {bound};",
        "  IF held THEN",
        f"    RAISE unique_violation USING CONSTRAINT = {literal(target.constraint)};",
        "  END IF;",
        "END LOOP;",
    ]


def _key_text(target: Target) -> str:
    return f"ROW({', '.join(target.entry.columns[i].of('NEW') for i in target.entry.key_positions)})::text"


def _of_delta(source: Source, target: Target) -> list[str]:
    """Locks stale rows of the delta, too: the fold must not bring them to the base, where it would wait for us."""
    entry, delta = target.entry, physical.delta(target.generation_id)
    holder = ", ".join(entry.physical(entry.rest_positions, prefix="d."))
    regular = f"d.state = '{EntryState.REGULAR.value}'"
    return [
        "FOR holder IN",
        f"  SELECT {holder} FROM {delta} d WHERE {unique_put.key_is(target, 'NEW', 'd.')} AND {regular} FOR UPDATE",
        "LOOP",
        *indent(unique_put.ask(source, target, "NEW")),
        "END LOOP;",
    ]
