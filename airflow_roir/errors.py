"""The errors of this package, in one small tree.

Each message names the problem, the index, operation or range, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RoirError(Exception):
    """Base of all errors that this package raises on purpose.

    `exit_code`: the exit code of the `roir` command and of the Spark driver after it.
    """

    exit_code = 1

    @property
    def sqlstate(self) -> str | None:
        """The SQLSTATE of the database's error that is its `__cause__`; None if there is none."""
        found = getattr(self.__cause__, "orig", None)
        return getattr(found, "pgcode", None) or getattr(found, "sqlstate", None)


class InvalidInput(RoirError):
    """A definition, an option or a name can't be used. Nothing was changed.

    parts: the single complaints, if it names several.
    """

    exit_code = 2
    parts: tuple[RoirError, ...] = ()


class Complaints:
    """Collects what checks find wrong with an input, so that one error names all of it.

    Each check runs in `noted()`; `settle()` ends the collection.
    """

    def __init__(self) -> None:
        self.found: list[RoirError] = []

    def __bool__(self) -> bool:
        return bool(self.found)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keeps the InvalidInput or NotFound of the check inside, which ends there."""
        try:
            yield
        except (InvalidInput, NotFound) as complaint:
            self.add(complaint)

    def add(self, *complaints: RoirError) -> None:
        """Keeps each complaint, or each of its parts, unless one says the same."""
        for complaint in complaints:
            for one in getattr(complaint, "parts", ()) or (complaint,):
                if str(one) not in map(str, self.found):
                    self.found.append(one)

    def settle(self) -> None:
        """Raises what was found: a single complaint as it is, several as one InvalidInput with a line each."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = "".join(f"\n- {complaint}" for complaint in self.found)
            whole = InvalidInput(f"{len(self.found)} errors:{lines}")
            whole.parts = tuple(self.found)
            raise whole


class RightMissing(InvalidInput):
    """The role lacks rights that the command needs; the message names them. Nothing was changed."""


class NotFound(RoirError):
    """An index, an operation, a table or a column that was named doesn't exist. Nothing was changed."""

    exit_code = 2


class SchemaVersionMismatch(RoirError):
    """The control schema `roir` is missing, of another version than this code, or restored from a dump."""

    exit_code = 2


class SchemaMissing(SchemaVersionMismatch):
    """The database has no control schema: it has nothing to do with this package, or `roir init` hasn't run yet."""


class OperationRunning(RoirError):
    """Another run drives the operation; the message names it.

    by: what is waited for, in the same words at each look; the message may have figures.
    """

    exit_code = 4

    def __init__(self, message: str, by: str | None = None) -> None:
        super().__init__(message)
        self.by = by or message


class OperationPaused(RoirError):
    """The operation was paused while this run drove it. Everything committed stays."""

    exit_code = 3


class OperationQueued(RoirError):
    """The limit of operations at the same time is reached. Nothing was changed; this one starts when its turn comes."""

    exit_code = 5


class IllegalTransition(RoirError):
    """A request that the operation's status and phase don't allow (docs/architecture.md#lifecycle)."""


class Fenced(RoirError):
    """A newer run or worker has taken over this one's work: this one must stop, and has changed nothing (I4)."""

    exit_code = 4


class OperationAborted(Fenced):
    """Somebody has aborted the operation: its run must stop. The message says who, and why."""


class HistoryChanged(RoirError):
    """The server, or its history, isn't the one in which this began: a replica was promoted. Begin again."""


class ReadOnlyServer(RoirError):
    """The server is a standby: nothing can be written there. Nothing was changed."""


class LockNotAcquired(RoirError):
    """A lock wasn't granted in time; the message names the blockers. Try again once they have ended."""


class AttachDisturbed(RoirError):
    """Rows came into the bounds of a table that is being attached, or entries of these bounds went: copy again."""


class SourceChanged(RoirError):
    """The source's shape has changed since the operation was prepared (fingerprint)."""


class PartitionsChanged(RoirError):
    """A partition came with rows, or went, without a capture. `roir sync-partitions` repairs the index."""


class LabelsRenamed(RoirError):
    """Labels of an enum in the primary key aren't those of bounds and watermarks. Rename them back, then resume."""


class SparkFailed(RoirError):
    """Spark couldn't be started, or gave up. The operation is paused with the reason and can be resumed."""


class WorkerFailed(RoirError):
    """A worker met an error that its own patience couldn't help; the operation holds the reason.

    permanent: every other try would meet the error again.
    """

    def __init__(self, message: str, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class RowRefused(RoirError):
    """The entry of a row can't be computed: an expression of the index, or its condition, raises an error for it.

    The message names the row. The operation is paused: change or delete the row, then resume.
    """


class OperationFailed(RoirError):
    """To continue would be wrong; the operation is `failed` and can only be aborted."""


class InvariantViolated(RoirError):
    """A check before publish found that the new generation isn't complete. Nothing was published."""


class OrphansFound(RoirError):
    """Rows of a child have keys that no row of the parent has. The operation is paused; repair the rows, and resume."""

    exit_code = 3


class DuplicatesFound(RoirError):
    """Rows share a key of a unique index that is being built. Users aren't disturbed; the operation is paused."""

    exit_code = 3


class VerificationFailed(RoirError):
    """The new generation differs from its source. Nothing was published; the operation is paused."""


class StaleAnswer(RoirError):
    """An index over shards may lack writes that are older than the read allows; the message names the shard. Retry."""


class NotStrict(RoirError):
    """An index over shards can't be read strictly now; the message says why, and what to do."""


class IndexUnreachable(RoirError):
    """The server of an index over shards can't be reached; the message names the index. Retry."""


class ShardUnreachable(RoirError):
    """A shard can't be reached; the message names it. `shard` is its name."""

    def __init__(self, message: str, shard: str) -> None:
        super().__init__(message)
        self.shard = shard


class JavaMissing(RoirError):
    """The machine that runs Spark's driver has no Java that Spark can run on, or SPARK_HOME leads to no Spark.

    Nothing was changed.
    """

    exit_code = 2
