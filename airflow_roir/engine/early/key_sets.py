"""Sets of hashes of keys, each with its place, as sorted arrays; what a new one has in common with an older one.

Of a hash 40 bits are kept, and beside them in which few blocks of the segment the row is: so what comes twice is looked
up where it is. Two keys with one hash cost the look at two places. Pure: no I/O.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

# Sorted by the hash, which is above the place.
Hashes = npt.NDArray[np.uint64]

# A place is so many blocks, by their number: 4 of 8 KB, in segments of up to 512 GB. Beyond that places come again, and
# the seal finds what isn't found there.
PLACE_BLOCKS = 4
PLACE_BITS = 24
PLACES = (1 << PLACE_BITS) - 1
# Of the hash that the server makes.
HASH = (1 << 64 - PLACE_BITS) - 1
# How many rows with one hash are looked up: of a key that more have the seal tells all.
MOST_OF_ONE = 64
# The header of COPY in binary, and of its one value: signature, flags, extension, number of columns, length.
HEADER = 11 + 4 + 4
VALUE = 2 + 4
NULL = -1


def read(data: bytes) -> Hashes:
    """Hashes and places, as the server has strung them together: of each place its number, how many there are, they."""
    words = np.frombuffer(data, dtype=">u8").astype(np.uint64)
    places, counts, heads = [], [], []
    at = 0
    while at < len(words):
        place, count = divmod(int(words[at]), 1 << 32)
        places.append(place & PLACES)
        counts.append(count)
        heads.append(at)
        at += 1 + count
    hashes: Hashes = np.delete(words, heads) << np.uint64(PLACE_BITS)
    return hashes | np.repeat(np.array(places, dtype=np.uint64), counts)


def hashes_of(found: Hashes) -> list[int]:
    """As the server has them after `& HASH`, each once."""
    return [int(one) for one in np.unique(found >> np.uint64(PLACE_BITS))]


def blocks_of(found: Hashes) -> list[int]:
    """The first blocks of their places, each once."""
    return [int(one) * PLACE_BLOCKS for one in np.unique(found & np.uint64(PLACES))]


def join(known: Hashes, new: Hashes) -> tuple[Hashes, Hashes]:
    """What is known then, and all with a hash that came again: those that were known, too.

    known: sorted; so is what is returned. new: in any order.
    """
    bits = np.uint64(PLACE_BITS)
    # Two sorted runs: a stable sort merges them, at a tenth of the price of probing one by one.
    new = np.sort(new)
    both = np.concatenate([known, new])
    both.sort(kind="stable")
    same = (both[1:] ^ both[:-1]) >> bits == 0
    if not same.any():
        return both, both[:0]
    again = both[np.concatenate([same, [False]]) | np.concatenate([[False], same])]
    hashes, came = again >> bits, new >> bits
    # What was known twice already was looked up then.
    among = came[np.minimum(np.searchsorted(came, hashes), len(came) - 1)] == hashes if len(came) else hashes != hashes
    rank = np.arange(len(hashes)) - np.searchsorted(hashes, hashes)
    return both, np.unique(again[among & (rank < MOST_OF_ONE)])


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
