"""An operation that is carried from one phase to another in the midst of schedules, at one turn of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from airflow_roir.engine import switch
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run
from tests.engine import stages, steps
from tests.engine.ground import Failure, Ground, Outcomes, by_slot
from tests.engine.isolation import Play, Schedule, Session

PHASES = ("nothing", "prepared", "built", "sealed", "switched", "folded", "published")
# Where they begin they wait for all writers.
DRAINED = ("prepared", "switched", "published")
# Plays at a time: each has two sessions, of a hundred that the server takes.
ABREAST = 12
NUMBERS = itertools.count()
LEGS = tuple(itertools.combinations(PHASES, 2))


def drains(begin: str, end: str) -> bool:
    """True where no writer may be under way between two phases."""
    return any(phase in PHASES[PHASES.index(begin) + 1 : PHASES.index(end) + 1] for phase in DRAINED)


class Crossing:
    """Plays whose builds go on in their midst: each on a table of its own, with sessions that stay open meanwhile."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.sessions: list[list[Session]] = []

    def __enter__(self) -> Crossing:
        for _ in range(ABREAST):
            self.sessions.append([Session(self.ground.dsn) for _ in range(2)])
        return self

    def __exit__(self, *_: object) -> None:
        for session in itertools.chain(*self.sessions):
            session.close()

    def sweep(self, schedules: Iterable[Schedule], begin: str, end: str) -> None:
        """As `Ground.sweep`, from one phase to another."""
        for lot in self.ground.lots(schedules, ABREAST):
            self.play(*lot, begin, end)

    def play(self, schedules: Sequence[Schedule], twins: Sequence[Outcomes], begin: str, end: str) -> list[Failure]:
        """As `Ground.play`; at the build's turn the operation goes from one phase to another."""
        ground, name = self.ground, f"crossed_{next(NUMBERS)}"
        ground.run(f"{ground.create(name)}; {ground.fill(name, ABREAST)}; ANALYZE {name}")
        operation = Voyage(ground, name)
        operation.reach(begin)
        if begin != "nothing" and not operation.touched:
            operation.touch()
        plays = [
            Play(schedule, ground.rows(name, slot).sql, self.sessions[slot], ground.watcher)
            for slot, schedule in enumerate(schedules)
        ]
        for play in plays:
            play.go_on()
        operation.reach(end)
        for play in plays:
            while not play.over:
                play.go_on()
        wrong = operation.wrong()
        operation.reach("published")
        for slot, later in operation.wrong().items():
            wrong.setdefault(slot, [f"after publish: {', '.join(later)}"])
        return ground.judge(plays, twins, wrong, f"{begin} to {end}")


class Voyage:
    """One operation on its way."""

    def __init__(self, ground: Ground, table: str) -> None:
        self.ground = ground
        self.table = table
        self.phase = "nothing"
        self.touched = False
        self.run: Run
        self.job: Job

    def reach(self, phase: str) -> None:
        """Go on to a phase."""
        # What is enforced isn't disturbed: entries come into the delta before it is.
        if self.ground.definition and phase != "nothing" and not self.touched:
            self.reach_plainly("sealed")
            self.touch()
        self.reach_plainly(phase)

    def touch(self) -> None:
        """Bring some entries into the delta."""
        self.touched = True
        for statement in self.ground.touch(self.table, ABREAST):
            self.ground.run(statement)

    def reach_plainly(self, phase: str) -> None:
        """As `reach`, where nothing is written."""
        for following in PHASES[PHASES.index(self.phase) + 1 : PHASES.index(phase) + 1]:
            self._go_on(following)
            self.phase = following

    def _go_on(self, phase: str) -> None:
        database = self.ground.database
        if phase == "prepared":
            options = {"ranges": 3, "segments": 2, "batch_rows": 7, "lock_timeout_ms": 500, "lock_patience_s": 5}
            _, self.run = steps.begin(
                database, f"ix_{self.table}", self.table, include="v", **{**options, **self.ground.definition}
            )
            with database.transaction() as connection:
                self.job = load_job(connection, self.run)
        elif phase == "built":
            steps.build_all(database, self.run)
        elif phase == "sealed":
            steps.seal_all(database, self.run)
        elif phase == "switched":
            switch.switch(database, self.run)
        elif phase == "folded":
            steps.fold_delta(database, self.run)
        else:
            steps.publish_all(database, self.run)

    def wrong(self) -> dict[int, list[str]]:
        """The entries that are missing or too many, by slot."""
        with self.ground.database.transaction() as connection:
            return by_slot(stages.differences(connection, self.job, self.phase == "published"))
