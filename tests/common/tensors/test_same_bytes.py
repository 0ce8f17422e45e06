"""What two states have in common, and what is left, make up the second one again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.tensors import same_bytes as module
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.common.tensors.same_bytes import (
    MAX_RANGES,
    SameBytes,
    changed_ranges,
    check_same,
    cut,
    num_changed_bytes,
    same_bytes,
)

pytestmark = pytest.mark.core

Held = tuple[Manifest, list[memoryview]]
SIZES = (0, 1, 7, 8, 9, 31, 64)


def held(tensors: dict[str, bytes]) -> Held:
    """Tensors of single bytes."""
    named = [(name, "uint8", (len(data),)) for name, data in tensors.items()]
    return build_manifest(named, Purpose.STATE), [memoryview(data) for data in tensors.values()]


def put_together(total: int, same: Sequence[SameBytes], sent: bytes, base: bytes) -> bytes:
    """The plain way."""
    whole = bytearray(total)
    for start, end in changed_ranges(same, total):
        whole[start:end], sent = sent[: end - start], sent[end - start :]
    for offset, base_offset, size in same:
        whole[offset : offset + size] = base[base_offset : base_offset + size]
    assert not sent
    return bytes(whole)


tensors = st.dictionaries(
    st.sampled_from("abcdef"),
    st.sampled_from(SIZES).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
)


@given(tensors, tensors, st.sampled_from("abcdef"), st.integers(0, 63), st.integers(1, 9))
def test_what_is_sent_makes_up_the_state(
    before: dict[str, bytes], others: dict[str, bytes], name: str, place: int, block: int
) -> None:
    after = {**before, **others}
    if place < len(after.get(name, b"")):  # one byte differs
        data = bytearray(after[name])
        data[place] ^= 1
        after[name] = bytes(data)
    base, state = held(before), held(dict(sorted(after.items())))
    same = same_bytes(*state, *base, block_bytes=block)
    check_same(same, state[0].total_bytes, base[0].total_bytes)
    pieces = list(cut(*state, same))
    sent = b"".join(pieces)
    assert all(pieces)
    assert len(sent) == num_changed_bytes(same, state[0].total_bytes)
    whole = put_together(state[0].total_bytes, same, sent, b"".join(base[1]))
    assert whole == b"".join(state[1])


def test_tied_tensors_travel_once_and_one_of_another_shape_is_another_one() -> None:
    named = [("a", "uint8", (8,)), ("b", "uint8", (8,)), ("c", "uint8", (1,))]
    state = build_manifest(named, Purpose.STATE, aliases={"b": "a"})
    buffers = [memoryview(bytes(8)), memoryview(b"1")]
    same = same_bytes(state, buffers, state, [buffers[0], memoryview(b"2")])
    assert same == [SameBytes(0, 0, 8)]
    assert list(cut(state, buffers, same)) == [b"1"]
    data = memoryview(bytes(range(8)))
    state = build_manifest([("a", "uint8", (8,)), ("b", "uint8", (8,))], Purpose.STATE)
    other = build_manifest([("a", "int8", (8,)), ("b", "uint8", (2, 4))], Purpose.STATE)
    assert same_bytes(state, [data, data], other, [data, data]) == []
    assert same_bytes(state, [data, data], state, [data, data]) == [SameBytes(0, 0, 16)]


def test_ranges_beyond_the_limit_count_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RANGES", 3)
    state, other = held({"a": b"01234567"}), held({"a": b"0-2-4-6-"})
    same = same_bytes(*state, *other, block_bytes=1)
    assert same == [SameBytes(at, at, 1) for at in (0, 2, 4)]
    assert b"".join(cut(*state, same)) == b"13567"
    with pytest.raises(LimitError, match="same: 4 ranges, the limit is 3"):
        check_same([SameBytes(at, at, 1) for at in range(4)], 8, 8)


@pytest.mark.parametrize(
    "same",
    [
        [SameBytes(0, 0, 0)],
        [SameBytes(0, 0, 4), SameBytes(3, 4, 2)],
        [SameBytes(4, 0, 2), SameBytes(0, 0, 2)],
        [SameBytes(5, 0, 4)],
        [SameBytes(0, 5, 4)],
        [SameBytes(2**63, 0, 2**63)],
        [SameBytes(0, 2**63, 2**63)],
    ],
)
def test_ranges_that_make_no_sense_are_refused(same: list[SameBytes]) -> None:
    with pytest.raises(InvalidInputError, match=r"same\["):
        check_same(same, 8, 8)
    assert len(same) < MAX_RANGES
