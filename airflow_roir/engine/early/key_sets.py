"""Sets of 64-bit hashes of keys, as sorted arrays; what a new one has in common with itself and with an older one.

Exact but for two keys with one hash, which 10^9 keys have with a probability of 3 %. Pure: no I/O.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

# As they come out of the server: big-endian. Only whether two are equal matters, so they are read as they lie.
BYTES = 8
# The header of COPY in binary, and of its one value: signature, flags, extension, number of columns, length.
HEADER = 11 + 4 + 4
VALUE = 2 + 4
NULL = -1


def read(data: bytes) -> Hashes:
    """The hashes of some batches, as the server has strung them together; in no order."""
    return np.frombuffer(data, dtype=np.uint64)


def as_integers(hashes: Hashes) -> list[int]:
    """What the server calls them: signed, of its own byte order."""
    return [int(one) for one in hashes.view(">i8")]


def join(known: Hashes, new: Hashes) -> tuple[Hashes, Hashes]:
    """What is known then, and those of the new ones that are there more than once, or were known.

    known: sorted, each once; so is what is returned. new: in any order.
    """
    # Two sorted runs: a stable sort merges them, at a tenth of the price of probing one by one.
    both = np.concatenate([known, np.sort(new)])
    both.sort(kind="stable")
    again = both[1:] == both[:-1]
    if not again.any():
        return both, both[:0]
    return both[np.concatenate([[True], ~again])], np.unique(both[1:][again])


class Kept:
    """Sets by segment, the least recently used ones forgotten where they exceed a bound. bound: in bytes."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.bytes = 0
        self._sets: OrderedDict[int, Hashes] = OrderedDict()

    def get(self, segment: int) -> Hashes | None:
        """None if it is to be read again."""
        if segment in self._sets:
            self._sets.move_to_end(segment)
        return self._sets.get(segment)

    def put(self, segment: int, hashes: Hashes) -> None:
        """Keep it, if it is within the bound; others go for it."""
        self.forget(segment)
        if hashes.nbytes > self.bound:
            return
        self._sets[segment] = hashes
        self.bytes += hashes.nbytes
        while self.bytes > self.bound:
            self.forget(next(iter(self._sets)))

    def forget(self, segment: int) -> None:
        """It is read again the next time."""
        gone = self._sets.pop(segment, None)
        if gone is not None:
            self.bytes -= gone.nbytes


def value_of_copy(data: bytes) -> bytes:
    """The values of the only column that COPY in binary has sent, strung together."""
    values = []
    at = HEADER
    while int.from_bytes(data[at : at + 2], "big", signed=True) != NULL:
        length = int.from_bytes(data[at + 2 : at + VALUE], "big", signed=True)
        at += VALUE
        if length != NULL:
            values.append(data[at : at + length])
            at += length
    return values[0] if len(values) == 1 else b"".join(values)
