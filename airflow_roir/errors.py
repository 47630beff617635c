"""The errors of this product, one small tree.

Each message says what happened, to which index, operation or range, and what to do next.
"""

from __future__ import annotations


class RoirError(Exception):
    """Base of everything that this package raises on purpose.

    `exit_code` is what the `roir` command and the Spark driver return for it.
    """

    exit_code = 1

    @property
    def sqlstate(self) -> str | None:
        """The SQLSTATE of the database's error behind it, which is its `__cause__`; None if there is none."""
        found = getattr(self.__cause__, "orig", None)
        return getattr(found, "pgcode", None) or getattr(found, "sqlstate", None)


class InvalidInput(RoirError):
    """A definition, an option or a name can't be used. Nothing was changed."""

    exit_code = 2


class RightMissing(InvalidInput):
    """The role may not do what the command needs; the message says what to grant. Nothing was changed."""


class NotFound(RoirError):
    """An index, an operation, a table or a column that was named doesn't exist. Nothing was changed."""

    exit_code = 2


class SchemaVersionMismatch(RoirError):
    """The control schema `roir` is missing, of another version than this code, or restored from a dump."""

    exit_code = 2


class SchemaMissing(SchemaVersionMismatch):
    """The database has no control schema: it has nothing to do with this package, or `roir init` hasn't run yet."""


class OperationRunning(RoirError):
    """Another run drives the operation; the message names it."""

    exit_code = 4


class OperationPaused(RoirError):
    """The operation was paused while this run drove it. Everything committed stays."""

    exit_code = 3


class OperationQueued(RoirError):
    """As many operations run as may at the same time. Nothing was changed; it starts when its turn comes."""

    exit_code = 5


class IllegalTransition(RoirError):
    """An operation was asked to do what its status and phase don't allow (docs/architecture.md#lifecycle)."""


class Fenced(RoirError):
    """A newer run or worker holds what this one worked on: it must stop, and has changed nothing (I4)."""

    exit_code = 4


class HistoryChanged(RoirError):
    """The server isn't the one, or not in the history, that this began in: a replica was promoted. Begin again."""


class ReadOnlyServer(RoirError):
    """The server is a standby: nothing can be written there. Nothing was changed."""


class LockNotAcquired(RoirError):
    """A lock couldn't be had in time; the message names the blockers. Try again once they have ended."""


class AttachDisturbed(RoirError):
    """Rows came into the bounds of a table that is being attached, or entries of these bounds went: copy again."""


class SourceChanged(RoirError):
    """The source's shape is no longer the one that the operation was prepared for (fingerprint)."""


class PartitionsChanged(RoirError):
    """A partition came with rows, or went, without a capture. `roir sync-partitions` repairs the index."""


class LabelsRenamed(RoirError):
    """Labels of an enum in the primary key aren't those of bounds and watermarks. Rename them back, then resume."""


class SparkFailed(RoirError):
    """Spark couldn't be started, or gave up. The operation is paused with the reason and can be resumed."""


class WorkerFailed(RoirError):
    """A worker met an error that trying again won't help; the operation holds the reason."""


class OperationFailed(RoirError):
    """To continue would be wrong; the operation is `failed` and can only be aborted."""


class InvariantViolated(RoirError):
    """A check before publish found that the new generation isn't complete. Nothing was published."""


class DuplicatesFound(RoirError):
    """Rows share a key of a unique index that is being built. Users aren't disturbed; the operation is paused."""

    exit_code = 3


class VerificationFailed(RoirError):
    """The new generation differs from its source. Nothing was published; the operation is paused."""


class StaleAnswer(RoirError):
    """An index apart may lack what was committed longer ago than the read allows; it names the shard. Retry."""


class NotStrict(RoirError):
    """An index apart can't be read strictly as things are; the message says why, and what to do."""


class IndexUnreachable(RoirError):
    """The server of an index apart can't be asked; the message names the index. Retry."""


class ShardUnreachable(RoirError):
    """A shard can't be asked; the message names it. `shard` is its name."""

    def __init__(self, message: str, shard: str) -> None:
        super().__init__(message)
        self.shard = shard


class JavaMissing(RoirError):
    """The machine that runs Spark's driver has no Java that Spark can run on, or SPARK_HOME leads to no Spark.

    Nothing was changed.
    """

    exit_code = 2
