"""The text of a source's capture function of TRUNCATE: it takes all entries, or a leaf's, out of every generation."""

from __future__ import annotations

from airflow_roir.engine import generation as physical
from airflow_roir.engine import tables
from airflow_roir.engine.capture_function import ACTIVE, CAPTURE, Target, function, indent
from airflow_roir.engine.catalog import Source


def truncate_function_name(source_oid: int) -> str:
    """The capture function of a source's TRUNCATE. It runs as our own role, and calls nothing of the owner's."""
    return f"{tables.DATA_SCHEMA}.truncate_{source_oid}"


def render_truncate(source: Source, generations: list[Target]) -> str:
    """The whole CREATE FUNCTION statement for TRUNCATE, pure text of its arguments."""
    return function(truncate_function_name(source.oid), truncate_body(source, generations))


def truncate_body(source: Source, generations: list[Target]) -> str:
    """What stands between the dollars of `render_truncate`."""
    return "\n".join(["BEGIN", *indent(_truncated(source, generations)), "  RETURN NULL;", "END"])


def _truncated(source: Source, generations: list[Target]) -> list[str]:
    if not generations:
        return ["-- No generation is maintained at present."]
    deltas = [physical.delta(g.generation_id) for g in generations if g.mode != ACTIVE]
    bases = [physical.base(g.generation_id) for g in generations]
    leaf = []
    if source.partitioned:
        # Delta before base, as the fold takes rows. In active mode the delta may be dropped at any time.
        stores = [
            (g, store)
            for g in generations
            for store in ([physical.delta(g.generation_id)] if g.mode != ACTIVE else [])
            + [physical.base(g.generation_id)]
        ]
        leaf = [
            f"IF TG_RELID <> {source.oid} THEN",
            f"  PERFORM roir.refuse_restored({source.oid});",
            f"  IF roir.may_truncate({source.oid}, TG_RELID) THEN",
            *(f"    PERFORM roir.forget_leaf({g.generation_id}, '{store}', TG_RELID);" for g, store in stores),
            *indent(_emptied(generations), 2),
            "  END IF;",
            "  RETURN NULL;",
            "END IF;",
        ]
    # In one statement, bases first: the fold locks in that order too, so the two can't deadlock.
    return [*leaf, f"TRUNCATE {', '.join([*bases, *deltas])};", *_emptied(generations)]


def _emptied(generations: list[Target]) -> list[str]:
    """What their blocks were planned for is gone, so that nothing is left to be scanned."""
    scanned = [f"({g.generation_id}, TG_RELID)" for g in generations if g.mode == CAPTURE and g.scan.by_blocks]
    return [f"INSERT INTO roir.emptied (generation_id, relation) VALUES {', '.join(scanned)};"] if scanned else []
