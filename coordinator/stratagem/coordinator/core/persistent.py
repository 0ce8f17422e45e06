"""Persistent collections: an immutable mapping, and an immutable sorted collection, whose changed
copies are cheap.

A changed copy shares all but a few small pieces with the original.
"""

from bisect import bisect_left, bisect_right
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Final, Generic, TypeVar, cast
from zlib import crc32

# ---- Mapping ----
#
# The mapping of text keys is a hash trie: inner nodes are tuples, leaves are small dicts. The
# hash is the same in every process. The order of iteration has no meaning and is not the order of
# insertion: above a leaf it is the order of the hashes, and within a leaf that of the changes.
# Equal mappings may therefore differ in it.

K = TypeVar("K", bound=str)
V = TypeVar("V")

_BITS: Final = 5
_MASK: Final = 2**_BITS - 1
_DEEPEST: Final = 32 // _BITS
_LEAF: Final = 16
"""The most keys of a leaf of the trie; a larger one becomes a node, except at the deepest level."""

_Node = Any
"""A node of the trie: a leaf, i.e. a dict[K, V], or a tuple of 32 nodes."""


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping; `with_item` and `without` return changed copies."""

    __slots__ = ("_num", "_root")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._root: _Node = _made(dict(items), 0) if items else {}
        self._num = len(items) if items else 0

    @classmethod
    def _of(cls, root: _Node, num: int) -> "PersistentMap[K, V]":
        made = cls.__new__(cls)
        made._root, made._num = root, num
        return made

    def with_item(self, key: K, value: V) -> "PersistentMap[K, V]":
        """Return a copy with one key set."""
        num = self._num + (key not in self)
        return self._of(_put(self._root, _place(key), 0, key, value), num)

    def without(self, key: K) -> "PersistentMap[K, V]":
        """Return a copy without one key; this very mapping if it does not have the key."""
        if key not in self:
            return self
        return self._of(_removed(self._root, _place(key), key), self._num - 1)

    def changed_since(self, before: "PersistentMap[K, V]") -> set[K]:
        """Return the keys whose values are not the same objects as in another mapping; only pieces
        that the two do not share are compared."""
        keys: set[K] = set()
        _differing(before._root, self._root, keys)
        return keys

    def __getitem__(self, key: K) -> V:
        node = self._root
        if type(node) is tuple:
            place = _place(key)
            while type(node) is tuple:
                node = node[place & _MASK]
                place >>= _BITS
        return cast("V", node[key])

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(_leaves(self._root))

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)


class _Values(ValuesView[V]):
    _mapping: PersistentMap[Any, V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(leaf.values() for leaf in _leaves(self._mapping._root))


class _Items(ItemsView[K, V]):
    _mapping: PersistentMap[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return chain.from_iterable(leaf.items() for leaf in _leaves(self._mapping._root))


def _place(key: str) -> int:
    return crc32(key.encode("utf-8", "surrogatepass"))


def _made(items: dict[Any, Any], depth: int) -> _Node:
    """Build the subtree that has these items, at this depth of the trie."""
    if len(items) <= _LEAF or depth == _DEEPEST:
        return items
    parts: list[dict[Any, Any]] = [{} for _ in range(_MASK + 1)]
    for key, value in items.items():
        parts[_place(key) >> _BITS * depth & _MASK][key] = value
    return tuple(_made(part, depth + 1) for part in parts)


def _put(node: _Node, place: int, depth: int, key: str, value: object) -> _Node:
    if type(node) is not tuple:
        return _made({**node, key: value}, depth)
    at = place & _MASK
    return (
        *node[:at],
        _put(node[at], place >> _BITS, depth + 1, key, value),
        *node[at + 1 :],
    )


def _removed(node: _Node, place: int, key: str) -> _Node:
    if type(node) is not tuple:
        return {other: value for other, value in node.items() if other != key}
    at = place & _MASK
    return (*node[:at], _removed(node[at], place >> _BITS, key), *node[at + 1 :])


def _leaves(node: _Node) -> Iterator[dict[Any, Any]]:
    if type(node) is not tuple:
        yield node
        return
    for child in node:
        if type(child) is tuple:
            yield from _leaves(child)
        elif child:
            yield child


def _differing(before: _Node, now: _Node, keys: set[Any]) -> None:
    if before is now:
        return
    if type(before) is tuple and type(now) is tuple:
        for one, other in zip(before, now, strict=True):
            if one is not other:
                _differing(one, other, keys)
        return
    old, new = (
        dict(chain.from_iterable(leaf.items() for leaf in _leaves(node))) for node in (before, now)
    )
    missing = object()
    keys |= {
        key for key in old.keys() | new.keys() if old.get(key, missing) is not new.get(key, missing)
    }


# ---- Sorted collection ----
#
# A changed collection shares all but one of its pieces with the one before.

T = TypeVar("T", bound=tuple[Any, ...])

_PIECE: Final = 256
"""The size of a piece in items; a piece that reaches twice this size is cut in two."""


class PersistentOrder(Generic[T]):
    """An immutable sorted set of tuples; `with_item` and `without` return changed copies."""

    __slots__ = ("_pieces",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        ordered = tuple(sorted(items))
        self._pieces = tuple(
            ordered[start : start + _PIECE] for start in range(0, len(ordered), _PIECE)
        )

    def with_item(self, item: T) -> "PersistentOrder[T]":
        """Return a copy with one more item, which must be new."""
        at = min(self._piece_of(item), len(self._pieces) - 1)
        piece = self._pieces[at] if self._pieces else ()
        place = bisect_left(piece, item)
        longer = (*piece[:place], item, *piece[place:])
        half = len(longer) // 2
        parts = (longer,) if len(longer) < 2 * _PIECE else (longer[:half], longer[half:])
        return self._of((*self._pieces[: max(at, 0)], *parts, *self._pieces[at + 1 :]))

    def without(self, item: T) -> "PersistentOrder[T]":
        """Return a copy without an item, which must be present."""
        at = self._piece_of(item)
        shorter = tuple(other for other in self._pieces[at] if other != item)
        return self._of((*self._pieces[:at], *filter(None, (shorter,)), *self._pieces[at + 1 :]))

    def behind(self, item: T) -> Iterator[T]:
        """Yield the items greater than this one, in order; this item need not be present."""
        at = self._piece_of(item)
        for number, piece in enumerate(self._pieces[at:]):
            yield from piece[bisect_right(piece, item) :] if number == 0 else piece

    def __iter__(self) -> Iterator[T]:
        for piece in self._pieces:
            yield from piece

    def _piece_of(self, item: T) -> int:
        """Return the index of the first piece that ends with this item or a greater one."""
        return bisect_left(self._pieces, item, key=lambda piece: piece[-1])

    @classmethod
    def _of(cls, pieces: tuple[tuple[T, ...], ...]) -> "PersistentOrder[T]":
        made = cls.__new__(cls)
        made._pieces = pieces
        return made
