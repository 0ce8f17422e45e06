"""An immutable sorted collection that is cheap to change: a changed one shares all but one of its
pieces with the one before."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])

_PIECE: Final = 256
"""Items of a piece; twice as many are cut into two."""


class PersistentOrder(Generic[T]):
    """Tuples in order, each once; it never changes, and `with_item` and `without` return others."""

    __slots__ = ("_pieces",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        ordered = tuple(sorted(items))
        self._pieces = tuple(
            ordered[start : start + _PIECE] for start in range(0, len(ordered), _PIECE)
        )

    def with_item(self, item: T) -> "PersistentOrder[T]":
        """Return the collection with an item that it does not have."""
        at = min(self._piece_of(item), len(self._pieces) - 1)
        piece = self._pieces[at] if self._pieces else ()
        place = bisect_left(piece, item)
        longer = (*piece[:place], item, *piece[place:])
        half = len(longer) // 2
        parts = (longer,) if len(longer) < 2 * _PIECE else (longer[:half], longer[half:])
        return self._of((*self._pieces[: max(at, 0)], *parts, *self._pieces[at + 1 :]))

    def without(self, item: T) -> "PersistentOrder[T]":
        """Return the collection without an item that it has."""
        at = self._piece_of(item)
        shorter = tuple(each for each in self._pieces[at] if each != item)
        return self._of((*self._pieces[:at], *filter(None, (shorter,)), *self._pieces[at + 1 :]))

    def behind(self, item: T) -> Iterator[T]:
        """Yield the items that come after one, which need not be there, in order."""
        at = self._piece_of(item)
        for number, piece in enumerate(self._pieces[at:]):
            yield from piece[bisect_right(piece, item) :] if number == 0 else piece

    def __iter__(self) -> Iterator[T]:
        for piece in self._pieces:
            yield from piece

    def _piece_of(self, item: T) -> int:
        """Return the first piece that ends with this item or a later one."""
        return bisect_left(self._pieces, item, key=lambda piece: piece[-1])

    @classmethod
    def _of(cls, pieces: tuple[tuple[T, ...], ...]) -> "PersistentOrder[T]":
        made = cls.__new__(cls)
        made._pieces = pieces
        return made
