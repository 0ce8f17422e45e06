"""Checks of a source that read its first rows: that they are the same when they are read again, and
that a state of the source leads to exactly the rows that come next.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.generators import generators_kept, seed_generators
from stratagem.worker.data.purity_check import leaves_of
from stratagem.worker.data.stream_sources import StreamSource, opened, state_of
from stratagem.worker.user_code.entrypoints import user_code

_NUM_ROWS: Final = 3


@dataclass(frozen=True, slots=True)
class _Read:
    """Fingerprints of the leaves of some rows, and the source's state after the first of them."""

    rows: list[dict[str, str]]
    state: str | None


def check_stream(source: StreamSource, split: str, *, is_pure: bool) -> bool:
    """Reads the first rows of shard 0 several times; returns whether its states may be used.

    is_pure: raises InvalidInputError naming the row and the leaf that differ.
    """
    with generators_kept(), user_code(f"reading the first rows of data.{split}"):
        first, again = (_read_streams(opened(source, 0, 0, None), 0) for _ in range(2))
        if is_pure:
            _compare(first.rows, again.rows, split)
        if first.state is None:
            return False
        went_on = _read_streams(opened(source, 0, 0, first.state), 1)
        return went_on.rows == first.rows[1:] and _begins_anew(source, first)


def _begins_anew(source: StreamSource, first: _Read) -> bool:
    """Returns whether a source that has gone on from a state begins at its first row again."""
    return _read_streams(opened(source, 0, 0, None), 0).rows == first.rows


def _read_streams(rows: Iterable[object], first: int) -> _Read:
    """Reads rows from number `first` on."""
    iterator, found = iter(rows), []
    state = None
    for row in range(first, _NUM_ROWS):
        seed_generators(row)
        leaves = (dict(leaves_of(each)) for each in islice(iterator, 1))
        found.append(next(leaves, {}))
        state = state_of(rows) if row == 0 else state
    return _Read(found, state)


def _compare(first: list[dict[str, str]], again: list[dict[str, str]], split: str) -> None:
    for row, (one, other) in enumerate(zip(first, again, strict=True)):
        differing = [leaf for leaf in one | other if one.get(leaf) != other.get(leaf)]
        if differing:
            raise InvalidInputError.at(
                f"data.{split}",
                f"row {row} of a stream is not the same when it is read again: {differing[0]} "
                "differs; iter() must begin anew whenever it is called, and rows may draw from "
                "random, numpy.random or torch's default generator, which are seeded for each; or "
                "set execution.deterministic: false",
            )
