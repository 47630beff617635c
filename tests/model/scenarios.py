"""The bounds that are explored: small ones in every run of the tests, larger ones by `make model`."""

from __future__ import annotations

from tests.model.state import Bounds

READ_COMMITTED, REPEATABLE_READ = ("RC", 1), ("RR", 1)
BOTH = (READ_COMMITTED, REPEATABLE_READ)
ONE_ROW, TWO_ROWS = ((1, "a0"),), ((1, "a0"), (2, "b0"))
WITH_INCLUDED = ("a0", "a1", "b0")
NEW_VALUES = ("a1", "b0")  # of the row that is there: another included value, another key
# Users alone, an index that is there and no operation: the capture in active mode.
ACTIVE = {"built": True, "operations": 0}
TWICE, KEYS, SWAPS = ((1, "a0"), (2, "a0")), ("a0", "b0"), ("swap",)
# These begin at the switch. The base has a stale copy of an entry; the row that has this key now is in the delta.
DIRECT = {"switched": True, "operations": 0, "held": (2,), "stale": (("a", 1),), "unique": True}
MOVED = ((1, "b0"), (2, "a0"))

DEFAULT = {
    "a create": Bounds(BOTH, TWO_ROWS),
    "an old snapshot with two writes": Bounds((READ_COMMITTED, ("RR", 2))),
    "an included column": Bounds((("RC", 2), REPEATABLE_READ), primary_keys=(1,), values=WITH_INCLUDED),
    "three writers": Bounds((READ_COMMITTED, READ_COMMITTED, REPEATABLE_READ), primary_keys=(1,)),
    "every statement in two steps": Bounds(BOTH, primary_keys=(1,), fine=True),
    "a second worker and a zombie": Bounds((READ_COMMITTED,), TWO_ROWS, claims=2, takeovers=1, workers=2),
    "an abort, then a create": Bounds(BOTH, primary_keys=(1,), operations=2, aborts=1),
    "a create, then a rebuild": Bounds(BOTH, primary_keys=(1,), operations=2),
    "a rebuild": Bounds(BOTH, built=True),
    "swapped primary keys": Bounds((("RC", 2),), ((1, "a0"), (2, "a0")), swaps=True, key="immediate"),
    "a truncate": Bounds(BOTH, TWO_ROWS, truncates=1),
    "a deleted row in an old snapshot": Bounds(
        (READ_COMMITTED, ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, upserts=True, nested=True
    ),
    "a primary key moves onto a deleted one": Bounds(BOTH, ((1, "a0"), (2, "a1")), values=(), moves=True),
    "a deferred key, alone": Bounds(
        (("RC", 4),), primary_keys=(1,), values=WITH_INCLUDED, key="deferred", twins=2, **ACTIVE
    ),
    "a deferred key": Bounds((READ_COMMITTED, ("RC", 2)), primary_keys=(1,), values=NEW_VALUES, key="deferred"),
    "a deferred key, old snapshots": Bounds(
        (("RC", 2), ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, key="deferred", **ACTIVE
    ),
    "a deferred key, a snapshot before prepare": Bounds(
        BOTH, (), primary_keys=(1,), values=("a1",), key="deferred", nested=True
    ),
    "a deferred key, a trigger that deletes": Bounds(
        (READ_COMMITTED, READ_COMMITTED),
        (),
        primary_keys=(1,),
        values=("a1",),
        key="deferred",
        nested=True,
        fine=True,
        **ACTIVE,
    ),
    "a deferrable key": Bounds(
        (("RC", 2), ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, key="immediate", nested=True, **ACTIVE
    ),
    "two of one scan": Bounds(
        (READ_COMMITTED,), primary_keys=(1,), values=("b0",), operations=2, together=2, workers=2
    ),
    "two of one scan, one is aborted": Bounds(
        (READ_COMMITTED,), primary_keys=(1,), values=("b0",), operations=2, together=2, aborts=1
    ),
    "unique: a create": Bounds((READ_COMMITTED, READ_COMMITTED), TWICE, values=KEYS, unique=True),
    "unique: a deleted row beside a pair": Bounds(
        (("RC", 2), READ_COMMITTED), primary_keys=(2, 3), values=("a0",), unique=True
    ),
    "unique: swapped keys": Bounds(BOTH, TWO_ROWS, primary_keys=(1,), values=("b0",), maps=SWAPS, unique=True),
    "unique: a rebuild": Bounds(BOTH, TWO_ROWS, primary_keys=(1,), values=("b0",), maps=SWAPS, unique=True, built=True),
    "unique: direct mode": Bounds((("RC", 2), ("RC", 2)), MOVED, values=KEYS, maps=SWAPS, **DIRECT),
    "unique: direct mode, old snapshots": Bounds((("RC", 2), ("RR", 2)), MOVED, values=KEYS, maps=SWAPS, **DIRECT),
    "unique: direct mode, an included column": Bounds(
        (("RC", 2), READ_COMMITTED), MOVED, primary_keys=(2, 3), values=("a0", "a1"), maps=SWAPS, **DIRECT
    ),
    "unique: direct mode, a trigger that deletes": Bounds(
        (("RC", 3),), ((2, "a0"),), values=("a0",), nested=True, fine=True, **DIRECT
    ),
    "unique: two fold steps": Bounds(
        (), MOVED, folds=2, fine=True, **{**DIRECT, "held": (1, 2), "stale": (("a", 1), ("b", 2))}
    ),
    "unique: active": Bounds((("RC", 2), ("RC", 2)), values=("a0",), fine=True, unique=True, **ACTIVE),
    "unique: active, old snapshots": Bounds(
        (("RC", 2), ("RR", 2)), TWO_ROWS, values=KEYS, maps=SWAPS, fine=True, unique=True, **ACTIVE
    ),
    "unique: active, a deferrable key": Bounds(
        (("RC", 2), ("RR", 2)), TWO_ROWS, values=KEYS, key="immediate", unique=True, **ACTIVE
    ),
    "unique: active, a deferred key": Bounds(
        (("RC", 2), ("RR", 2)), TWO_ROWS, values=KEYS, key="deferred", unique=True, **ACTIVE
    ),
}
LARGE = {
    "two writes each": Bounds((("RC", 2), ("RR", 2)), TWO_ROWS),
    "four writers": Bounds((READ_COMMITTED, READ_COMMITTED, REPEATABLE_READ, REPEATABLE_READ), primary_keys=(1,)),
    "every statement in two steps, two fold workers": Bounds(BOTH, TWO_ROWS, folds=2, fine=True),
    "every statement in two steps, an included column": Bounds(
        (("RC", 2), REPEATABLE_READ), primary_keys=(1,), values=WITH_INCLUDED, fine=True
    ),
    "zombies of workers and folds": Bounds(BOTH, TWO_ROWS, claims=2, takeovers=1, workers=2, folds=2),
    "an abort with zombies, then a create": Bounds(
        (READ_COMMITTED,), primary_keys=(1,), claims=2, workers=2, operations=2, aborts=1
    ),
    "a create, then a rebuild, two writes": Bounds(
        (("RC", 2), REPEATABLE_READ), primary_keys=(1,), values=WITH_INCLUDED, operations=2
    ),
    "swapped primary keys, old snapshots": Bounds(
        (("RC", 2), REPEATABLE_READ), ((1, "a0"), (2, "a0")), swaps=True, key="immediate"
    ),
    "swapped primary keys in a rebuild, a truncate": Bounds(
        BOTH, ((1, "a0"), (2, "a0")), swaps=True, key="immediate", built=True, truncates=1
    ),
    "old snapshots, every statement in two steps": Bounds(
        (READ_COMMITTED, ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, upserts=True, nested=True, fine=True
    ),
    "old snapshots, moves and upserts": Bounds(
        (("RC", 2), ("RR", 3)), ((1, "a0"), (2, "a1")), values=NEW_VALUES, moves=True, upserts=True, **ACTIVE
    ),
    "a deferred key, moves": Bounds(
        (("RC", 2), ("RC", 2)), ((1, "a0"), (2, "a0")), values=NEW_VALUES, key="deferred", moves=True, **ACTIVE
    ),
    "a deferred key, three writers": Bounds(
        (READ_COMMITTED, ("RC", 2), ("RR", 2)),
        primary_keys=(1,),
        values=NEW_VALUES,
        key="deferred",
        nested=True,
        **ACTIVE,
    ),
    "a deferred key, two writes each": Bounds(
        (("RC", 2), ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, key="deferred", nested=True
    ),
    "a deferrable key, two writes each": Bounds(
        (("RC", 2), ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, key="immediate", nested=True
    ),
    "a deferred key, every statement in two steps": Bounds(
        (READ_COMMITTED, ("RC", 2)), primary_keys=(1,), values=("a1",), key="deferred", nested=True, fine=True
    ),
    "a deferred key, two writes each, every statement in two steps": Bounds(
        (("RC", 2), ("RR", 2)), primary_keys=(1,), values=NEW_VALUES, key="deferred", nested=True, fine=True, **ACTIVE
    ),
    "a deferred key in a rebuild": Bounds(
        BOTH, primary_keys=(1,), values=NEW_VALUES, key="deferred", nested=True, built=True
    ),
    "two of one scan, two writes": Bounds((("RC", 2),), TWO_ROWS, values=("b0",), operations=2, together=2, workers=2),
    "two of one scan, an old snapshot, an abort": Bounds(
        BOTH, primary_keys=(1,), operations=2, together=2, workers=2, aborts=1
    ),
    "unique: two writes each": Bounds((("RC", 2), ("RC", 2)), TWICE, values=KEYS, maps=SWAPS, unique=True),
    "unique: swapped keys, an old snapshot": Bounds(BOTH, TWO_ROWS, values=KEYS, maps=SWAPS, unique=True),
    "unique: every statement in two steps": Bounds(
        (READ_COMMITTED, READ_COMMITTED), values=KEYS, fine=True, unique=True
    ),
    "unique: swapped keys, every statement in two steps": Bounds(
        (READ_COMMITTED, READ_COMMITTED), TWO_ROWS, values=(), maps=SWAPS, fine=True, unique=True
    ),
    "unique: three writers": Bounds((READ_COMMITTED,) * 3, TWO_ROWS, values=KEYS, unique=True),
    "unique: shifted keys": Bounds(
        (READ_COMMITTED, READ_COMMITTED),
        ((1, "a0"), (2, "b0"), (3, "c0")),
        primary_keys=(3,),
        values=KEYS,
        maps=("swap", "shift"),
        unique=True,
    ),
    "unique: a trigger that deletes": Bounds((("RC", 2), READ_COMMITTED), TWICE, values=KEYS, nested=True, unique=True),
    "unique: an abort, then a create": Bounds(
        (READ_COMMITTED, READ_COMMITTED), TWICE, values=KEYS, operations=2, aborts=1, unique=True
    ),
    "unique: a create, then a rebuild": Bounds(
        BOTH, TWO_ROWS, primary_keys=(1,), values=("b0",), maps=SWAPS, operations=2, unique=True
    ),
    "unique: a rebuild, an old snapshot": Bounds(BOTH, TWO_ROWS, values=KEYS, maps=SWAPS, built=True, unique=True),
    "unique: zombies of workers": Bounds(
        (("RC", 2),), TWICE, values=KEYS, claims=2, takeovers=1, workers=2, unique=True
    ),
    "unique: moves and upserts": Bounds(BOTH, TWO_ROWS, values=KEYS, moves=True, upserts=True, unique=True),
    "unique: a truncate": Bounds(BOTH, TWICE, values=KEYS, truncates=1, unique=True),
    "unique: a deferred key": Bounds((READ_COMMITTED, ("RC", 2)), TWICE, values=KEYS, key="deferred", unique=True),
    "unique: active, three writers": Bounds(
        (READ_COMMITTED, READ_COMMITTED, REPEATABLE_READ),
        TWO_ROWS,
        primary_keys=(1, 2, 3),
        values=KEYS,
        maps=SWAPS,
        fine=True,
        unique=True,
        **ACTIVE,
    ),
    "unique: direct mode, three writers": Bounds(
        (READ_COMMITTED, READ_COMMITTED, REPEATABLE_READ), MOVED, values=KEYS, maps=SWAPS, **DIRECT
    ),
    "unique: direct mode, every statement in two steps": Bounds(
        (("RC", 2), READ_COMMITTED), MOVED, values=KEYS, maps=SWAPS, fine=True, **DIRECT
    ),
    "unique: two fold steps, a third key": Bounds(
        (READ_COMMITTED,),
        ((1, "b0"), (2, "c0")),
        primary_keys=(1, 2, 3),
        values=KEYS,
        folds=2,
        fine=True,
        **{**DIRECT, "held": (1, 2), "stale": (("a", 1), ("b", 2))},
    ),
}
