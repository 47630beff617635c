"""Sets of hashes of keys, each with its place, as sorted arrays; finds the hashes that two sets have in common.

An element is 40 bits of a hash, and the row's place: a few blocks of the segment. So the rows of a hash that comes
twice are looked up only there. Two keys with the same hash cost a look at two places. Pure: no I/O.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

# The hash is in the high bits, the place in the low bits: so the order is that of the hashes.
Hashes = npt.NDArray[np.uint64]

# A place is this many blocks. With blocks of 8 KB places are unique in segments of up to 512 GB. Beyond that they
# repeat, and the seal finds the rows that aren't found by them.
PLACE_BLOCKS = 4
PLACE_BITS = 24
PLACES = (1 << PLACE_BITS) - 1
# The bits of the server's hash that are kept.
HASH = (1 << 64 - PLACE_BITS) - 1
# At most this many rows with the same hash are looked up: if more share a key, the seal lists them all.
MOST_OF_ONE = 64
# Bytes of the header of a binary COPY (signature, flags, extension), and of its one value (number of columns, length).
HEADER = 11 + 4 + 4
VALUE = 2 + 4
NULL = -1


def read(data: bytes) -> Hashes:
    """Hashes with their places, from the server's bytes: for each place its number, the count of hashes, the hashes."""
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
    """The distinct hashes, as the server has them after `& HASH`."""
    return [int(one) for one in np.unique(found >> np.uint64(PLACE_BITS))]


def blocks_of(found: Hashes) -> list[int]:
    """The distinct first blocks of the hashes' places."""
    return [int(one) * PLACE_BLOCKS for one in np.unique(found & np.uint64(PLACES))]


def join(known: Hashes, new: Hashes) -> tuple[Hashes, Hashes]:
    """Both sets together; and all elements, known ones too, whose hash is in `new` and in the set twice.

    known: sorted, as are the results. new: in any order.
    """
    bits = np.uint64(PLACE_BITS)
    # Two sorted runs: a stable sort merges them in a tenth of the time of a search for each element.
    new = np.sort(new)
    both = np.concatenate([known, new])
    both.sort(kind="stable")
    same = (both[1:] ^ both[:-1]) >> bits == 0
    if not same.any():
        return both, both[:0]
    again = both[np.concatenate([same, [False]]) | np.concatenate([[False], same])]
    hashes, came = again >> bits, new >> bits
    # Hashes that were known twice before have been looked up then.
    among = came[np.minimum(np.searchsorted(came, hashes), len(came) - 1)] == hashes if len(came) else hashes != hashes
    rank = np.arange(len(hashes)) - np.searchsorted(hashes, hashes)
    return both, np.unique(again[among & (rank < MOST_OF_ONE)])


class Kept:
    """Sets by segment, up to a bound in bytes; beyond it, the least recently used ones are forgotten."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.bytes = 0
        self._sets: OrderedDict[int, Hashes] = OrderedDict()

    def get(self, segment: int) -> Hashes | None:
        """The segment's set; None if it must be read again."""
        if segment in self._sets:
            self._sets.move_to_end(segment)
        return self._sets.get(segment)

    def put(self, segment: int, hashes: Hashes) -> None:
        """Keep the segment's set if it is within the bound; forget others to make room."""
        self.forget(segment)
        if hashes.nbytes > self.bound:
            return
        self._sets[segment] = hashes
        self.bytes += hashes.nbytes
        while self.bytes > self.bound:
            self.forget(next(iter(self._sets)))

    def forget(self, segment: int) -> None:
        """Forget the segment's set, which must be read again the next time."""
        gone = self._sets.pop(segment, None)
        if gone is not None:
            self.bytes -= gone.nbytes


def value_of_copy(data: bytes) -> bytes:
    """The values of the only column of a binary COPY, joined."""
    values = []
    at = HEADER
    while int.from_bytes(data[at : at + 2], "big", signed=True) != NULL:
        length = int.from_bytes(data[at + 2 : at + VALUE], "big", signed=True)
        at += VALUE
        if length != NULL:
            values.append(data[at : at + length])
            at += length
    return values[0] if len(values) == 1 else b"".join(values)
