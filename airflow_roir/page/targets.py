"""Finds the operations that a DAG run is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import Connection, or_, select

from airflow_roir.actor import RUN
from airflow_roir.definition import QualifiedName, argument, parse_name
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.page.databases import connection_of
from airflow_roir.page.settings import COMPACT_DAG, CONTROL_DAG, VERIFY_DAG, our_dags
from airflow_roir.task.run_state import OVER

# The most operations shown of one run; a DAG of groups has one per index.
MOST_OPERATIONS = 50
PREPARE = "prepare"

OPERATIONS = """
SELECT o.id, o.kind, o.status, o.owner, o.created_by, i.schema_name, i.name,
       coalesce(CASE WHEN o.run_ended_at IS NULL THEN o.awaited_by END, o.owner) AS last_run,
       o.status IN ('running', 'paused', 'failed') AS live,
       o.status = 'running' AND o.heartbeat_at IS NOT NULL
       AND abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < %(fresh)s AS alive,
       o.status = 'paused' AND o.run_ended_at IS NOT NULL AS gone, m.owns, m.created
  FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 -- Tasks of a mapped group add their index in the map.
 CROSS JOIN LATERAL (SELECT coalesce(o.owner = %(run)s OR starts_with(o.owner, %(run)s || ' ['), false) AS owns,
                            coalesce(o.created_by = %(run)s OR starts_with(o.created_by, %(run)s || ' ['), false)
                            AS created) m
 WHERE m.owns OR m.created OR o.id = ANY (%(adopted)s)
    OR o.id = (SELECT max(x.id) FROM roir.operation x JOIN roir.index n ON n.id = x.index_id
                WHERE n.dropped_at IS NULL AND n.name = %(name)s
                  AND (%(schema)s::text IS NULL OR n.schema_name = %(schema)s))
 ORDER BY m.owns OR m.created OR o.id = ANY (%(adopted)s) DESC,
          -- Operations at work first: of a hundred that were prepared at once, one may be at work.
          alive DESC NULLS LAST, live DESC, o.id DESC
 LIMIT %(most)s
"""


@dataclass(frozen=True)
class Run:
    """A DAG run as Airflow knows it. switch_off: its DAG is paused. form: the values that it was triggered with.

    stale: its DAG is in no file any more. by_hand: a user has triggered it.
    """

    dag_id: str
    run_id: str
    state: str
    switch_off: bool
    form: dict[str, Any]
    # The results of its tasks `prepare`, by group and map index; '': no group.
    prepared: dict[tuple[str, int], int]
    stale: bool = False
    by_hand: bool = True

    @property
    def has_ended(self) -> bool:
        """True if Airflow starts no task of the run any more, unless a user clears one."""
        return self.state in OVER or self.stale

    @property
    def adopted(self) -> tuple[int, ...]:
        """The operations that its task `prepare` outside of groups has returned."""
        return tuple(number for (group, _), number in self.prepared.items() if not group)

    def prepared_by(self, task_id: str, map_index: int) -> int | None:
        """The operation that a task is about, by the task `prepare` beside it."""
        return self.prepared.get((task_id.rpartition(".")[0], map_index)) if task_id else None

    def task_of(self, one: Found) -> dict[str, Any] | None:
        """The task that drives an operation, if that is known."""
        if one.kind == "verify":
            task = {VERIFY_DAG: "verify", "rebuild_index": "verify_before"}.get(self.dag_id)
            return None if task is None else {"task_id": task, "map_index": -1}
        if one.kind == "compact":
            return {"task_id": "compact", "map_index": one.map_index} if self.dag_id == COMPACT_DAG else None
        for (group, map_index), number in self.prepared.items():
            if number == one.operation:
                return {"task_id": f"{group}.build" if group else "build", "map_index": map_index}
        return None

    def left_behind(self, one: Found) -> bool:
        """Whether this run has ended and its operation hasn't, after a mark or a timeout."""
        is_idle = one.drives and not one.at_work and one.status in ("running", "paused")
        return self.has_ended and is_idle and (not one.elsewhere or one.left)

    def continued_by(self, one: Found) -> dict[str, str] | None:
        """The run or command that has continued an operation of this run, which has ended; None if nothing has.

        name: of a command. dag_id, run_id: of a run. An abort isn't one, although it names its actor as the owner.
        """
        if one.status in ("aborting", "aborted"):
            return None
        if not self.has_ended or self.dag_id == CONTROL_DAG or not one.elsewhere or one.left:
            return None
        named = RUN.fullmatch(one.last_run)
        return {"name": one.last_run} if named is None else {"dag_id": named[1], "run_id": named[2]}

    def how_to_go_on(self, one: Found) -> str:
        """What to do with an operation that was left behind, or whose task alone has ended."""
        task = self.task_of(one) if not self.stale else None
        clear = f"clear its task {task['task_id']} with those that follow it (Downstream)" if task else ""
        if not self.has_ended:
            by_hand = f"roir resume {argument(one.index)}"
            return f"No task of this run will continue it: {f'{clear}, or: {by_hand}' if clear else by_hand}"
        said = "This run has ended, and no run drives the operation. Continue it: that triggers a run for it"
        return f"{said}, or {clear}" if clear else said

    @property
    def can_be_repeated(self) -> bool:
        """True if another run with the same values may do what this one failed to do.

        A run of another DAG may be about its date, which a triggered one doesn't have.
        """
        return self.state == "failed" and (self.by_hand or self.is_ours) and not self.stale

    @property
    def missed(self) -> str | None:
        """The index that a run which has ended should have worked on, if no operation is its own."""
        is_over = self.state in OVER and self.dag_id != CONTROL_DAG
        return str(self.index) if is_over and self.index is not None else None

    @property
    def owner(self) -> str:
        """The name under which its tasks drive operations, mapped ones with more (`task.roir_operator.owner_of`)."""
        return f"airflow {self.dag_id} {self.run_id}"

    @property
    def is_ours(self) -> bool:
        """True if its form counts. A user who may trigger another DAG could name any index in that one's form."""
        return self.dag_id in our_dags()

    @property
    def connection(self) -> str | None:
        """The connection that its form names; None: look for its operations everywhere."""
        return connection_of(self.form) if self.is_ours else None

    @property
    def index(self) -> QualifiedName | None:
        """The index that its form names."""
        given = self.form.get("index") if self.is_ours else None
        try:
            return parse_name(given, "index") if isinstance(given, str) else None
        except InvalidInput:
            return None


@dataclass(frozen=True)
class Found:
    """An operation that a run is about. drives: the run drives it, or would continue it.

    at_work: a run drives it now. map_index: of the task that drives it, or did last; -1 if it isn't mapped. elsewhere:
    another run has driven it last, or is awaited. created_by: the run or user that has begun it. last_run: the run or
    command that drives it, will, or did last. left: the operation is paused, and neither drives it any more.
    """

    connection: str
    operation: int
    index: str
    kind: str
    status: str
    drives: bool
    at_work: bool
    map_index: int = -1
    elsewhere: bool = False
    created_by: str = ""
    last_run: str = ""
    left: bool = False


def read_run(dag_id: str, run_id: str) -> Run:
    """Reads the run. Raises NotFound."""
    with create_session() as session:
        run = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        if run is None:
            raise NotFound(f"DAG {dag_id} has no run {run_id}")
        dag = session.get(DagModel, dag_id)
        values = session.execute(
            select(XComModel.task_id, XComModel.map_index, XComModel.value).where(
                XComModel.dag_id == dag_id,
                XComModel.run_id == run_id,
                or_(XComModel.task_id == PREPARE, XComModel.task_id.endswith(f".{PREPARE}")),
                XComModel.key == "return_value",
            )
        ).all()
        return Run(
            dag_id,
            run_id,
            str(getattr(run.state, "value", run.state)),
            bool(dag is not None and dag.is_paused),
            run.conf if isinstance(run.conf, dict) else {},
            {
                (one.task_id.rpartition(".")[0], one.map_index): number
                for one in values
                if (number := _number(one.value)) is not None
            },
            bool(dag is None or dag.is_stale),
            run.run_type == "manual",
        )


def _number(value: Any) -> int | None:
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return read if isinstance(read, int) and not isinstance(read, bool) and 0 < read < 2**63 else None


def operations_of(database: Database, connection_id: str, run: Run) -> list[Found]:
    """The operations of the run in that database: first those that it drives or has driven; the newest first."""
    with database.transaction() as connection:
        check_schema(connection)
        return find(connection, connection_id, run)


def find(connection: Connection, connection_id: str, run: Run) -> list[Found]:
    """As `operations_of`, inside a transaction."""
    # A run that has ended is about its own operations alone. One that controls an operation has none.
    index = run.index if not run.has_ended or run.dag_id == CONTROL_DAG else None
    adopted = run.adopted if run.is_ours else ()
    rows = execute(
        connection,
        OPERATIONS,
        {
            "run": run.owner,
            "adopted": list(adopted),
            "name": None if index is None else index.name,
            "schema": None if index is None else index.schema,
            "fresh": sign_of_life.HEARTBEAT_FRESH_S,
            "most": MOST_OPERATIONS,
        },
    ).all()
    return [
        Found(
            connection_id,
            row.id,
            str(QualifiedName(row.schema_name, row.name)),
            row.kind,
            row.status,
            # Another run that is alive drives its own: this one only waits for it.
            row.live and (row.owns or ((row.created or row.id in adopted) and not row.alive)),
            bool(row.alive),
            _map_index(row.owner),
            row.last_run is not None and row.last_run != run.owner and not row.last_run.startswith(f"{run.owner} ["),
            row.created_by,
            row.last_run or "",
            row.gone,
        )
        for row in rows
    ]


def _map_index(owner: str | None) -> int:
    found = RUN.fullmatch(owner or "")
    return -1 if found is None or found[3] is None else int(found[3])


def runs_of(database: Database, ids: Sequence[int]) -> dict[int, dict[str, str]]:
    """The DAG runs that drive these operations, by operation; none for an operation that a command drives."""
    query = "SELECT id, owner FROM roir.operation WHERE id = ANY (%(ids)s)"
    with database.transaction() as connection:
        rows = execute(connection, query, {"ids": list(ids)}).all() if ids else []
    found = {row.id: RUN.fullmatch(row.owner or "") for row in rows}
    return {one: {"dag_id": match[1], "run_id": match[2]} for one, match in found.items() if match is not None}
