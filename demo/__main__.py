"""`make demo`: what a newcomer sees first. Exit code 0 only if everything that it shows held."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.engine.snapshot.operation import status as read_status
from airflow_roir.engine.verify.report import VerifyReport
from airflow_roir.operation import OF_A_BUILD, Phase
from demo.application import Asked, ask
from demo.dataset import Dataset, Unique, analyze, flights, lineitem
from demo.writer import Felt, Writer
from servers.airflow import AirflowError, StandaloneAirflow, processes_of, wait_until
from servers.postgres import programs, start_postgres

ROOT = Path(__file__).parent.parent
STATE = ROOT / ".demo" / "state.json"
DAG = "rebuild_index"
# The connection that the forms name if nothing else is filled in, so that a newcomer's first own run finds the data.
CONNECTION = "postgres_default"
FIRST_PARALLELISM, SECOND_PARALLELISM = 2, 4
# So slow that a person can watch it and pause it; the small table would else be done before the page is loaded.
BUILD_S = 26
BASELINE_S = 10
# A busy machine needs ten times as long as a quiet one.
PATIENCE_S = 900

console = Console(highlight=False)


@dataclass
class Story:
    """The events of the demo, for the report, and the expectations that didn't hold."""

    dataset: Dataset
    rows: int
    paused_at: float = 0.0
    connections_while_paused: int = -1
    before: Felt | None = None
    during: Felt | None = None
    ended: OperationStatus | None = None
    comparison: VerifyReport | None = None
    lookup_rows: int = 0
    lookup_ms: tuple[float, float] = (0.0, 0.0)
    asked: Asked | None = None
    # The unique index: its comparison, and the errors that refuse PostgreSQL's own index and a second row of a key.
    unique: VerifyReport | None = None
    refusals: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave everything running")
    parser.add_argument("--scale", type=float, help="TPC-H lineitem at this scale factor instead of the flights")
    parser.add_argument("--stop", action="store_true", help="stop what --keep left running, and clean up")
    options = parser.parse_args()
    stop_what_is_left()
    if options.stop:
        return 0
    say("PostgreSQL and Airflow start, then an index is built, paused and resumed: three to five minutes")
    begun = time.monotonic()
    dataset = lineitem(options.scale) if options.scale else flights()
    folder = Path(tempfile.mkdtemp(prefix="roir-demo-"))
    server = start_postgres(folder, keep=True)
    parts = psycopg2.extensions.parse_dsn(server.get_uri())
    connection = {"host": parts["host"], "login": parts["user"], "schema": parts["dbname"]}
    airflow = StandaloneAirflow(
        folder / "airflow",
        ROOT / "dags",
        server.get_uri(),
        # Here too, since clean_up_indexes runs as soon as Airflow is up, before a connection can be added.
        environment={f"AIRFLOW_CONN_{CONNECTION.upper()}": json.dumps({"conn_type": "postgres"} | connection)},
    )
    STATE.parent.mkdir(exist_ok=True)
    try:
        STATE.write_text(json.dumps({"folder": str(folder)}))
        install.init(Database(server.get_uri(), "roir demo"))
        airflow.start()
        story = tell(dataset, server.get_uri(), airflow, connection)
        show(story, time.monotonic() - begun)
        # Whole lines also where they are too long, so that an address can be copied.
        for line in (
            (
                f"\nAirflow's UI: {airflow.url}   (DAG {DAG}; nobody is asked for a password)",
                f"PostgreSQL:   export ROIR_DSN='{server.get_uri()}'",
                *([] if shutil.which("psql") else [f'psql:         export PATH="$PATH:{programs(18)}"']),
                "Next:         docs/first-index.md",
                "Stop both:    make demo-stop",
            )
            if options.keep
            else ("\nNext: make demo KEEP=1 leaves both servers running for docs/first-index.md",)
        ):
            console.print(line, markup=False, soft_wrap=True)
    except AirflowError as error:
        # The log goes with the servers.
        console.print(f"{error}\nAirflow's log ends so:\n{airflow.log_tail()}", markup=False, soft_wrap=True)
        console.print("make demo KEEP=1 leaves the servers running, to look at them", markup=False)
        return 1
    finally:
        if not options.keep:
            stop_what_is_left()
    return 1 if story.broken else 0


def tell(dataset: Dataset, dsn: str, airflow: StandaloneAirflow, connection: dict[str, str]) -> Story:
    """The whole story, from loading to the look through the index."""
    database = Database(dsn, "roir demo")
    say(f"loading {dataset.title}")
    with psycopg2.connect(dsn) as session:
        rows = dataset.load(session)
    session.close()
    analyze(dsn, dataset.table)
    story = Story(dataset, rows)
    say(f"{rows:,} rows; Airflow is starting: up to a minute")
    airflow.wait_until_ready([DAG])
    airflow.add_connection(CONNECTION, "postgres", **connection)
    say(f"Airflow is up: {airflow.url} (nobody is asked for a password)")
    say(f"a writer starts; for {BASELINE_S} s it is alone")
    writer = Writer(dsn, dataset)
    writer.start()
    try:
        time.sleep(BASELINE_S)
        story.before = writer.take()
        run_dag(story, database, airflow, dsn)
        story.during = writer.take()
        for _ in range(3):
            compared = verify(database, dataset.index)
            story.expect(compared.is_exact, f"index = source while the writer goes on: {compared}")
    finally:
        writer.finish()
    story.comparison = verify(database, dataset.index)
    story.expect(story.comparison.is_exact, "index = source at the end")
    story.expect(story.comparison.rows > 0 and story.during.commits > 0, "the writer wrote during the build")
    look_up(story, dsn)
    if dataset.unique is not None:
        story.unique = verify(database, dataset.unique.index)
        story.expect(story.unique.is_exact and story.unique.rows > 0, "unique index = source at the end")
        collide(story, dataset.unique, dsn)
    story.asked = asked = ask(dataset, dsn)
    story.expect(asked.same and asked.rows[1] > 0, "the application's query finds the same rows")
    story.expect(asked.partitions[1] < asked.partitions[0], "the application's query opens fewer partitions")
    red = in_red(airflow)
    story.expect(not red, f"nothing is red in Airflow: {', '.join(red)}")
    return story


def in_red(airflow: StandaloneAirflow) -> list[str]:
    """The failures that Airflow's UI shows in red: runs and tasks that failed, a DAG file that can't be imported."""
    runs = airflow.call("GET", "/api/v2/dags/~/dagRuns?state=failed")["dag_runs"]
    tasks = airflow.call(
        "GET", "/api/v2/dags/~/dagRuns/~/taskInstances?state=failed&state=upstream_failed&state=up_for_retry"
    )["task_instances"]
    return [
        *(f"{run['dag_id']} {run['dag_run_id']}" for run in runs),
        *(f"{task['dag_id']} {task['task_id']} {task['dag_run_id']}" for task in tasks),
        *airflow.import_errors(),
    ]


def run_dag(story: Story, database: Database, airflow: StandaloneAirflow, dsn: str) -> None:
    """Trigger, pause by the DAG's switch in the middle, change the parallelism, resume, and wait for the publish."""
    dataset = story.dataset
    say(f"triggering {DAG} with {FIRST_PARALLELISM} workers")
    run = airflow.trigger(
        DAG,
        {
            "index": dataset.index,
            "table": dataset.table,
            "keys": dataset.keys,
            "include": dataset.include,
            "parallelism": FIRST_PARALLELISM,
            "batch_rows": 20_000,
            "max_rows_per_second": max(story.rows // BUILD_S, 1000),
        },
    )

    say(f"watch it: {airflow.url}/dags/{DAG}/runs/{quote(run, safe=':')}/plugin/index-build")

    def standing() -> OperationStatus:
        return read_status(database, dataset.index)[0]

    def started() -> bool:
        state = airflow.task_state(DAG, run, "prepare")
        if state == "failed":
            raise SystemExit(airflow.task_log(DAG, run, "prepare"))
        return state == "success"

    wait_until(started, PATIENCE_S, "prepare")
    say("prepared: writes are captured from now on; the next task starts Spark")
    told = Told()
    wait_until(lambda: told.of(standing()).percent_complete > 30, PATIENCE_S, "a third of the build")
    say("pausing: the DAG's switch goes off")
    airflow.pause(DAG)
    wait_until(
        lambda: airflow.task_state(DAG, run, "build") == "up_for_reschedule", PATIENCE_S, "the build task to leave"
    )
    paused = standing()
    story.paused_at = paused.percent_complete
    story.expect(paused.status == "paused", f"paused, not {paused.status}")
    story.connections_while_paused = connections(database)
    story.expect(story.connections_while_paused == 0, "no connection of ours while paused")
    say(f"paused at {paused.percent_complete:g} %; {SECOND_PARALLELISM} workers from now on; the switch goes on again")
    airflow.put_stored(DAG, run, "build", "parallelism", SECOND_PARALLELISM)
    airflow.unpause(DAG)
    with build_unique(story, dsn):
        wait_for_publish(story, database, airflow, run)


@dataclass
class Told:
    """The part of a build that was said last."""

    line: str = ""

    def of(self, one: OperationStatus) -> OperationStatus:
        """Says the operation's phase, and each tenth of a build, once; returns the operation."""
        done = f": {one.percent_complete // 10 * 10:.0f} % of all" if one.phase == Phase.BUILD else ""
        line = f"{one.phase}{done}"
        if line != self.line and one.status == "running":
            say(line)
            self.line = line
        return one


def wait_for_publish(story: Story, database: Database, airflow: StandaloneAirflow, run: str) -> None:
    """Waits for the end of the DAG's run, and looks at what it did; its tasks' logs are printed if it failed."""

    told = Told()

    def ended() -> str | None:
        told.of(read_status(database, story.dataset.index)[0])
        state = airflow.run_state(DAG, run)
        return state if state in ("success", "failed") else None

    state = wait_until(ended, PATIENCE_S, "the end of the DAG run")
    if state == "failed":
        for task in ("prepare", "build", "finalize"):
            console.print(airflow.task_log(DAG, run, task), markup=False)
    story.expect(state == "success", f"the DAG run's state is {state}")
    story.ended = read_status(database, story.dataset.index)[0]
    story.expect(story.ended.status == "completed", f"published, not {story.ended.status}")
    story.expect(story.ended.options["parallelism"] == SECOND_PARALLELISM, "resumed with another parallelism")
    say("published")


@contextmanager
def build_unique(story: Story, dsn: str) -> Iterator[None]:
    """Builds the unique index by the command line beside the block, and waits for it afterwards; nothing if there is
    none."""
    dataset = story.dataset
    if (unique := dataset.unique) is None:
        yield
        return
    options = ["build", unique.index, "--table", dataset.table, "--keys", unique.keys, "--unique"]
    say(f"beside it, without Airflow: roir {' '.join(options)}")
    command = [Path(sys.executable).parent / "roir", *options]
    environment = {**os.environ, "ROIR_DSN": dsn}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as builder:
        try:
            yield
            said, _ = builder.communicate(timeout=PATIENCE_S)
            story.expect(builder.returncode == 0, f"the unique index is built: {said}")
        finally:
            builder.terminate()


def connections(database: Database) -> int:
    """Sessions that the product holds, this question's own aside."""
    with database.transaction() as connection:
        return int(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'roir%%' AND pid <> pg_backend_pid()"
            ).scalar_one()
        )


def look_up(story: Story, dsn: str) -> None:
    """The same question to the source and to the index: the same answer, sooner."""
    dataset = story.dataset
    answers, times = [], []
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        for relation in (dataset.table, dataset.index):
            best = float("inf")
            for _ in range(5):
                begun = time.perf_counter()
                cursor.execute(dataset.lookup.format(relation), dataset.lookup_values)
                rows = cursor.fetchall()
                best = min(best, (time.perf_counter() - begun) * 1000)
            answers.append(rows)
            times.append(best)
    connection.close()
    story.lookup_rows, story.lookup_ms = len(answers[1]), (times[0], times[1])
    story.expect(answers[0] == answers[1] and bool(answers[1]), "the lookup's answers are the same")


def collide(story: Story, unique: Unique, dsn: str) -> None:
    """A constraint of PostgreSQL's own, and a second row of a key that another partition has: both are refused."""
    connection = psycopg2.connect(dsn)
    for statement, expected in ((unique.native, "0A000"), (unique.collide, "23505")):
        with connection.cursor() as cursor:
            try:
                cursor.execute(statement)
            except psycopg2.Error as error:
                said = (error.diag.message_primary, error.diag.message_detail)
                story.refusals.append("refused: " + "\n".join(filter(None, said)))
                story.expect(error.pgcode == expected, f"{statement}: {error}")
            else:
                story.expect(False, f"{statement}: refused")
        connection.rollback()
    connection.close()


def show(story: Story, seconds: float) -> None:
    """The report."""
    ended, compared = story.ended, story.comparison
    assert ended is not None
    assert compared is not None
    assert story.before is not None
    assert story.during is not None
    title = f"{ended.index}, over {story.rows:,} {story.dataset.title}"
    table = Table(title=title, show_header=False, title_justify="left")
    phases = ("prepare", *(phase.value for phase in OF_A_BUILD))
    rows = {
        "phases, seconds": ", ".join(f"{name} {ended.phase_seconds.get(name, 0):.1f}" for name in phases),
        "copied": f"{ended.rows:,} rows, {ended.rows_per_second or 0:,.0f} rows/s "
        f"(limited to {ended.options['max_rows_per_second']:,})",
        "pauses": f"1, by the DAG's switch at {story.paused_at:g} %, with {story.connections_while_paused} "
        f"connections left; resumed with {ended.options['parallelism']} workers instead of {FIRST_PARALLELISM}",
        "writer alone": _felt(story.before),
        "writer during": _felt(story.during),
        "comparison": _compared(compared),
        "lookup": f"{story.lookup_rows:,} rows; by the index {story.lookup_ms[1]:.2f} ms, "
        f"by the table {story.lookup_ms[0]:.2f} ms",
    }
    if (asked := story.asked) is not None:
        rows["an application"] = (
            f"SQLAlchemy's query by {asked.keys} opens {asked.partitions[0]} partitions; with roir-client, unchanged, "
            f"{asked.partitions[1]} (rows: {asked.rows[1]})"
        )
    if story.unique is not None and len(story.refusals) == 2:
        rows |= {"unique index": f"{story.unique.index}, {_compared(story.unique)}"}
        rows |= dict(zip(("a native one", "a second row"), story.refusals, strict=True))
    rows["all of it"] = f"{seconds:.0f} s"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
    for what in story.broken:
        console.print(f"DID NOT HOLD: {what}", style="bold red", markup=False)


def _compared(report: VerifyReport) -> str:
    return f"{report.rows:,} rows: missing {report.missing}, extra {report.extra}, different {report.different}"


def _felt(felt: Felt) -> str:
    return f"{felt.commits:,} commits, p50 {felt.p50_ms:.2f} ms, p99 {felt.p99_ms:.2f} ms"


def say(line: str) -> None:
    console.print(f"[{time.strftime('%H:%M:%S')}] {line}", markup=False, soft_wrap=True)


def stop_what_is_left() -> None:
    """Stops this or an earlier demonstration's processes, and removes what it wrote."""
    if not STATE.exists():
        return
    folder = Path(json.loads(STATE.read_text())["folder"])
    family = processes_of(folder / "airflow")
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=15)
    if (folder / "data").exists():
        server = start_postgres(folder, keep=True)
        server.cleanup_mode = "stop"
        server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)
    STATE.unlink()


if __name__ == "__main__":
    sys.exit(main())
