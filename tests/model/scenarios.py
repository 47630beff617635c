"""The bounds that are explored: small ones in every run of the tests, larger ones by `make model`."""

from __future__ import annotations

from tests.model.state import Bounds

READ_COMMITTED, REPEATABLE_READ = ("RC", 1), ("RR", 1)
BOTH = (READ_COMMITTED, REPEATABLE_READ)
ONE_ROW, TWO_ROWS = ((1, "a0"),), ((1, "a0"), (2, "b0"))
WITH_INCLUDED = ("a0", "a1", "b0")

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
    "swapped primary keys, old snapshots": Bounds((("RC", 2), REPEATABLE_READ), ((1, "a0"), (2, "a0")), swaps=True, key="immediate"),
    "swapped primary keys in a rebuild, a truncate": Bounds(
        BOTH, ((1, "a0"), (2, "a0")), swaps=True, key="immediate", built=True, truncates=1
    ),
}
