"""What clients keep to themselves: whole or not there, by its digest, and no longer than needed."""

import hashlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.worker.host import client_states
from stratagem.worker.host.client_states import ClientStateStore

RUN = "run-1"


def state(value: float) -> dict[str, Tensor]:
    tied = torch.full((3, 2), value)
    named = {"model/a": tied, "model/b": tied, "model/n": torch.tensor(7)}
    return {**named, "model/e": torch.empty(0)}


def store_in(folder: Path) -> ClientStateStore:
    return ClientStateStore(folder / "clients-w", "w")


def test_a_state_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    digest = store_in(tmp_path).save(RUN, 4, 2, state(0.5))
    path = store_in(tmp_path).path(RUN, 4, 2)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_mode & 0o777 == 0o600
    back = store_in(tmp_path).load(RUN, 4, 2, digest)
    assert back.keys() == state(0.5).keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state(0.5).items())
    assert back["model/n"].dtype == torch.int64


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "another round", "no state"])
def test_a_state_that_is_not_as_it_was_kept_is_lost(tmp_path: Path, damage: str) -> None:
    store = store_in(tmp_path)
    digest = store.save(RUN, 0, 3, state(1.0))
    path, wanted = store.path(RUN, 0, 3), 3
    data, said = path.read_bytes(), r"worker w has nothing of round \d as it was"
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-1])
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "another round":
            wanted = 2
        case _:
            path.write_bytes(b"no safetensors")
            digest = hashlib.sha256(b"no safetensors").hexdigest()
            said = "cannot be read"
    with pytest.raises(NotFoundError, match=said):
        store.load(RUN, 0, wanted, digest)


def test_a_run_that_is_no_name_and_a_folder_that_takes_nothing_are_said(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidInputError):
        store_in(tmp_path).save("../elsewhere", 0, 1, state(1.0))
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "clients-w").write_text("a file")
    with pytest.raises(InvalidInputError, match="cannot write what its client keeps"):
        store_in(tmp_path).save(RUN, 0, 1, state(1.0))


def test_the_run_written_longest_ago_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_states, "MAX_RUNS", 2)
    store = store_in(tmp_path)
    for number, run in enumerate(("first", "second")):
        store.save(run, 0, 1, state(1.0))
        os.utime(store.path(run, 0, 1).parent.parent, ns=(number, number))
    first = store.save("first", 0, 2, state(2.0), kept_rounds=[1])  # it is the newer one again
    store.save("third", 0, 1, state(3.0))
    assert sorted(path.name for path in (tmp_path / "clients-w").iterdir()) == ["first", "third"]
    assert store.load("first", 0, 2, first)


class Rounds(RuleBasedStateMachine):
    """A client's rounds as a coordinator asks for them, with crashes at any write."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = store_in(Path(self.folder.name))
        self.round_num = 0
        self.journaled: tuple[int, str] | None = None
        self.owed: dict[int, str] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    def _written(self, value: float) -> str:
        kept = {*self.owed, *([self.journaled[0]] if self.journaled else [])}
        return self.store.save(RUN, 0, self.round_num, state(value), kept)

    @rule(value=st.floats(-1, 1, width=32), is_accepted=st.booleans(), is_owed=st.booleans())
    def train(self, value: float, is_accepted: bool, is_owed: bool) -> None:
        """A round, whose update is journaled or not: it came too late, or was rejected."""
        self.round_num += 1
        digest = self._written(value)
        if is_accepted:
            self.journaled = (self.round_num, digest)
            if is_owed:
                self.owed[self.round_num] = digest

    @rule(value=st.floats(-1, 1, width=32))
    def train_again(self, value: float) -> None:
        """The process dies when the state is written; the next one makes the same state again."""
        self.round_num += 1
        first = self._written(value)
        self.store = store_in(Path(self.folder.name))
        part = self.store.path(RUN, 0, self.round_num)
        part.with_name(f".{part.name}.1.part").write_bytes(b"half")
        assert self._written(value) == first

    @rule(data=st.data())
    def evaluate(self, data: st.DataObject) -> None:
        if self.owed:
            del self.owed[data.draw(st.sampled_from(sorted(self.owed)))]

    @invariant()
    def all_that_is_needed_is_here(self) -> None:
        needed = {**self.owed, **dict([self.journaled] if self.journaled else [])}
        for round_num, digest in needed.items():
            self.store.load(RUN, 0, round_num, digest)

    @invariant()
    def nothing_else_piles_up(self) -> None:
        folder = self.store.path(RUN, 0, 1).parent
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        assert not any(name.endswith(".part") for name in names)
        assert len(names) <= 2 + ROUNDS_OWED


ROUNDS_OWED = 50
TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
