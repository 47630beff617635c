"""A phase by threads of this process, as many as the operation has at the time, until nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.claims import WorkLeft, granted_workers
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.shortage import patience_of, persist
from airflow_roir.engine.run import FATAL, Run, settle
from airflow_roir.engine.running import read_running
from airflow_roir.errors import HistoryChanged, OperationPaused

# The most that an operation's parallelism may be.
MOST_THREADS = 256
# How soon a grant, or a parallelism, that was raised is followed.
LOOK_EVERY_S = 1.0


def by_threads(
    database: Database,
    run: Run,
    work: Callable[[int], Iterable[object]],
    left: Callable[[Connection, Collection[int]], WorkLeft],
    finish: Callable[[], None],
    is_open: Callable[[Connection], bool],
) -> None:
    """Go through all pieces, and all stages of them. Raises OperationPaused, and what the work raises.

    work: of a worker, by its number, piece by piece. left: what is left, beside those workers. finish: ends a stage
    of which nothing is left. is_open: whether there is one.
    """

    def goes_on() -> bool:
        with database.transaction() as connection:
            read_running(connection, run)
            return is_open(connection)

    def wanted() -> int:
        with database.transaction() as connection:
            row = read_running(connection, run)
            # Under a hold one waits, and more come with the grant.
            return 1 if row.granted == 0 else granted_workers(row)

    def left_beside(busy: Collection[int] = ()) -> WorkLeft:
        with database.transaction() as connection:
            return left(connection, busy)

    def share(worker: int) -> None:
        patience = patience_of(database, run)
        while True:
            try:
                for _ in work(worker):
                    patience.renew()
                patience.renew()
                return
            except DBAPIError as error:
                if not patience.waits(error):
                    raise

    # Paused: what is left stays. A parallelism that was lowered leaves pieces, too.
    while persist(database, run, goes_on):
        if not persist(database, run, left_beside).undone:
            persist(database, run, finish)
            continue
        with ThreadPoolExecutor(max_workers=MOST_THREADS, thread_name_prefix="roir-work") as pool:
            shares: dict[Future[None], int] = {}
            try:
                missing = set(range(persist(database, run, wanted)))
                while missing or shares:
                    shares |= {pool.submit(share, worker): worker for worker in sorted(missing)}
                    done, _ = wait(shares, LOOK_EVERY_S, FIRST_COMPLETED)
                    for one in done:
                        del shares[one]
                        one.result()
                    busy = set(shares.values())
                    # Who wasn't granted has left, and comes again with the grant.
                    missing = set(range(persist(database, run, wanted))) - busy if busy else set()
                    if missing:
                        free = persist(database, run, lambda busy=busy: left_beside(busy)).free  # type: ignore[misc]
                        missing = set(sorted(missing)[:free])
            except HistoryChanged:
                # All of them meet it.
                raise
            except OperationPaused:
                # All of them see it, and leave. No error of one is lost.
                for one in as_completed(shares):
                    one.result()
                raise
            except BaseException as error:
                # Written down first, so that the others leave: to leave the block is to wait for them.
                settle(database, run, error, fatal=isinstance(error, FATAL))
                raise
