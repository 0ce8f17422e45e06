"""A snapshot is copied into the memory of one that nobody needs any more, and has the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import NotFoundError
from stratagem.worker.engine.state_format import copied
from stratagem.worker.session.states import StateStore, freeze
from tests.worker.engine.support import assert_same_bits


def state(seed: int, *, rows: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tied = torch.randn(3, 5, generator=generator)
    return {
        "tied": tied,
        "again": tied,
        "rows": torch.randn(rows, 5, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "nothing": torch.empty(0, 3),
        "nothing more": torch.empty(0, 3),
    }


def places(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}


def test_a_copy_takes_the_memory_of_an_older_one_where_it_fits() -> None:
    first, second = copied(state(1)), state(2)
    before = places(first)
    made = copied(second, first)
    assert_same_bits(made, copied(second))
    assert made["tied"] is made["again"]
    after = places(made)
    assert {name for name in before if after[name] == before[name]} == before.keys() - {"turned"}
    other = copied(state(3, rows=1), made)
    assert_same_bits(other, copied(state(3, rows=1)))
    assert places(other)["rows"] != after["rows"]


def test_two_tensors_never_get_the_memory_of_one() -> None:
    first = copied(state(1))  # of which two names are one tensor
    apart = {**state(2), "again": torch.ones(3, 5)}
    made = copied(apart, first)
    assert_same_bits(made, copied(apart))
    assert len(set(places(made).values())) == len(places(made))


def test_the_oldest_snapshot_is_taken_back_unless_it_is_read() -> None:
    store = StateStore()
    assert not store.take_back(1)
    for segment in (1, 2):
        store.keep(segment, freeze(copied(state(segment)), {}, is_reusable=True))
        assert store.has(1)
    with store.reading(1) as frozen:
        assert not store.take_back(3)  # and it is there for whoever continues to read it
        with store.reading(1) as again:
            assert again is frozen
        assert not store.take_back(3)
    freed = store.take_back(3)
    assert places(freed) == places(frozen.reusable)
    with pytest.raises(NotFoundError, match="no snapshot of segment 1 here; held: 2"):
        store.reading(1).__enter__()
    assert not store.take_back(3)  # there is room
    store.keep(3, freeze(copied(state(3), freed), {}, is_reusable=True))
    assert store.take_back(3).keys() == state(3).keys()  # its own, where it is taken again
    store.keep(3, freeze(copied(state(3)), {}))
    assert places(store.take_back(4)) != places(freed)  # those of 2
    store.keep(4, freeze(copied(state(4)), {}, is_reusable=True))
    assert not store.take_back(5)  # others have the tensors of 3
    assert not store.has(3)


def test_what_is_read_keeps_its_bytes_while_later_snapshots_are_taken() -> None:
    store = StateStore()
    store.keep(0, freeze(copied(state(0)), {}, is_reusable=True))
    with store.reading(0) as frozen:
        before = b"".join(frozen.buffers)
        for segment in range(1, 6):
            taken = store.take_back(segment)
            store.keep(segment, freeze(copied(state(segment), taken), {}, is_reusable=True))
        assert b"".join(frozen.buffers) == before
    with store.reading(5) as newest:
        expected = freeze(copied(state(5)), {})
        assert newest.manifest == expected.manifest
        assert b"".join(newest.buffers) == b"".join(expected.buffers)
