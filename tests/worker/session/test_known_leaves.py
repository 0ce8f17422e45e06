"""Leaves that have not changed are not hashed again, and no change goes unnoticed."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.tensors.leaves import leaves_of, pieces_of
from stratagem.worker.session import states as known_leaves
from stratagem.worker.session.states import Frozen, KnownLeaves, StateStore, freeze, hashed

Change = Callable[[Tensor], object]


class Model:
    """Two large parameters that do not train, and small ones beside them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.frozen = nn.Parameter(torch.randn(700_001, generator=generator), requires_grad=False)
        self.other = nn.Parameter(torch.randn(600, 600, generator=generator), requires_grad=False)
        self.small = torch.zeros(3)

    def snapshot(self, **added: Tensor) -> Frozen:
        named = {"frozen": self.frozen, "other": self.other, "small": self.small, **added}
        return freeze({name: each.detach().clone() for name, each in named.items()}, {})


class Hashing:
    """A session whose snapshots are hashed, and how many leaves of each were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = StateStore()
        self.known = KnownLeaves(self.states.glimpsing)
        self.num_hashed = 0
        monkeypatch.setattr(known_leaves, "hashed", self._count)
        self._segment = 0

    def _count(self, pieces: Sequence[memoryview]) -> bytes:
        self.num_hashed += 1
        return hashed(pieces)

    def digests(self, state: Frozen, numbers: Sequence[int] | None = None) -> int:
        """Take the digests of a snapshot, which must be right; return how many were hashed."""
        self._segment += 1
        self.states.keep(self._segment, state)
        return self.again(state, numbers)

    def again(self, state: Frozen, numbers: Sequence[int] | None = None) -> int:
        hasher, before = self.known.hasher(state), self.num_hashed
        leaves = leaves_of(state.manifest)
        for number in range(len(leaves)) if numbers is None else numbers:
            pieces = list(pieces_of(leaves[number], state.manifest, state.buffers))
            assert hasher.digest(number, pieces) == hashed(pieces)
        return self.num_hashed - before


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    return Hashing(monkeypatch)


def test_what_is_the_same_is_not_hashed_again(hashing: Hashing) -> None:
    model = Model()
    assert hashing.digests(model.snapshot()) == 3
    for _ in range(3):
        model.small += 1
        assert hashing.digests(model.snapshot()) == 1
    state = model.snapshot()
    assert hashing.digests(state, [0]) == 0
    assert hashing.again(state, [0, 1]) == 1, "of the one before only a share was known"
    assert hashing.again(state) == 1, "and now all that was hashed"


def by_storage(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storage[storage.nbytes() - 1] ^= 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("frozen", lambda tensor: tensor.mul_(2)),
        ("other", lambda tensor: tensor.data.mul_(2)),
        ("frozen", lambda tensor: tensor.data[-1:].mul_(-1)),  # in its last row
        ("other", lambda tensor: tensor.detach().numpy().__setitem__(-1, 7.0)),
        ("frozen", by_storage),  # in one bit
        ("other", by_storage),
    ],
)
def test_a_change_is_noticed_however_made(hashing: Hashing, name: str, change: Change) -> None:
    """Of parameters that do not train: torch counts only some of these."""
    model = Model()
    hashing.digests(model.snapshot())
    change(getattr(model, name))
    assert hashing.digests(model.snapshot()) == 1


def test_a_state_of_other_tensors_and_one_whose_base_is_gone_are_hashed(hashing: Hashing) -> None:
    model = Model()
    hashing.digests(model.snapshot())
    assert hashing.digests(model.snapshot(more=torch.zeros(300_000))) == 4
    assert hashing.digests(model.snapshot()) == 3
    hashing.states.keep(100, model.snapshot())
    hashing.states.keep(101, model.snapshot())
    assert hashing.digests(model.snapshot()) == 3


def test_memory_is_taken_back_between_two_leaves(hashing: Hashing) -> None:
    model = Model()
    first, second = model.snapshot(), model.snapshot()
    hashing.digests(first)
    hashing.states.keep(2, second)
    hasher = hashing.known.hasher(second)
    leaves = leaves_of(second.manifest)
    pieces = [list(pieces_of(leaf, second.manifest, second.buffers)) for leaf in leaves]
    before = hashing.num_hashed
    assert hasher.digest(0, pieces[0]) == hashed(pieces[0])
    assert hashing.num_hashed == before
    hashing.states.take_back(3)
    assert hasher.digest(1, pieces[1]) == hashed(pieces[1])
    assert hashing.num_hashed == before + 1
