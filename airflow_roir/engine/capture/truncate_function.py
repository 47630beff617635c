"""The text of a source's capture function of TRUNCATE: it removes all entries, or a leaf's, from every generation."""

from __future__ import annotations

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.capture.plpgsql import function, indent
from airflow_roir.engine.capture.target import ACTIVE, CAPTURE, Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source.source import Source


def truncate_trigger_name(source_oid: int) -> str:
    """The name of the capture trigger of TRUNCATE; each leaf has one of its own, since it isn't cloned."""
    return f"roir_truncate_{source_oid}"


def truncate_function_name(source_oid: int) -> str:
    """The name of the capture function of a source's TRUNCATE. It runs as roir's role and calls no owner's code."""
    return f"{DATA_SCHEMA}.truncate_{source_oid}"


def render_truncate(source: Source, generations: list[Target]) -> str:
    """The whole CREATE FUNCTION statement for TRUNCATE. Depends on nothing but its arguments."""
    return function(truncate_function_name(source.oid), truncate_body(source, generations))


def truncate_body(source: Source, generations: list[Target]) -> str:
    """The function's body, without the dollar quotes."""
    return "\n".join(["BEGIN", *indent(_truncated(source, generations)), "  RETURN NULL;", "END"])


def _truncated(source: Source, generations: list[Target]) -> list[str]:
    if not generations:
        return ["-- No generation is maintained at present."]
    deltas = [physical.delta(g.generation_id) for g in generations if g.mode != ACTIVE]
    bases = [physical.base(g.generation_id) for g in generations]
    if not source.partitioned:
        return [
            *_refused_written("pg_relation_size(TG_RELID)"),
            f"TRUNCATE {', '.join([*bases, *deltas])};",
            *_emptied(generations),
        ]
    # The delta before the base, as the fold takes rows. In active mode the delta may be dropped at any time.
    stores = [
        (g, store)
        for g in generations
        for store in ([physical.delta(g.generation_id)] if g.mode != ACTIVE else []) + [physical.base(g.generation_id)]
    ]
    size = " + ".join([*(_size_of_tree(f"'{base}'") for base in bases), *(f"pg_relation_size('{d}')" for d in deltas)])
    return [
        f"IF TG_RELID <> {source.oid} THEN",
        f"  PERFORM roir.refuse_restored({source.oid});",
        # By the files' sizes, which every snapshot sees. A TRUNCATE of the whole source fires this for each leaf, once
        # all entries are gone already.
        f"  IF {size} = 0 THEN",
        *indent(_emptied(generations), 2),
        "    RETURN NULL;",
        "  END IF;",
        f"  IF roir.may_truncate({source.oid}, TG_RELID) THEN",
        *indent(_refused_written("pg_relation_size(TG_RELID)"), 2),
        *(f"    PERFORM roir.forget_leaf({g.generation_id}, '{store}', TG_RELID);" for g, store in stores),
        *indent(_emptied(generations), 2),
        "  END IF;",
        "  RETURN NULL;",
        "END IF;",
        *_refused_written(_size_of_tree("TG_RELID")),
        # In one statement, bases first: the fold locks tables in that order, too, so the two can't deadlock.
        f"TRUNCATE {', '.join([*bases, *deltas])};",
        *_emptied(generations),
    ]


def _size_of_tree(relation: str) -> str:
    return f"(SELECT coalesce(sum(pg_relation_size(relid)), 0) FROM pg_partition_tree({relation}))"


def _refused_written(size: str) -> list[str]:
    """Raises if a trigger has written rows since the TRUNCATE: their events came first, their entries would be lost."""
    return [
        f"IF {size} > 0 THEN",
        "  RAISE feature_not_supported USING",
        "    MESSAGE = format('a trigger has written to %s since it was truncated', TG_RELID::regclass),",
        "    DETAIL = 'Its table has a roir index, whose entries of these rows would be lost.',",
        "    HINT = 'Write the rows in a statement after the TRUNCATE.';",
        "END IF;",
    ]


def _emptied(generations: list[Target]) -> list[str]:
    """Notes for generations that scan by blocks that the planned blocks are gone, and none is left to scan."""
    scanned = [f"({g.generation_id}, TG_RELID)" for g in generations if g.mode == CAPTURE and g.scan.by_blocks]
    return [f"INSERT INTO roir.emptied (generation_id, relation) VALUES {', '.join(scanned)};"] if scanned else []
