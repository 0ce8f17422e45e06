"""Late updates inside the fold against whole tensors in plain numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from stratagem.common.strategy import parse_strategy
from stratagem.common.tensors.manifest import Manifest, dtype_named
from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates.fold import Rebasing
from stratagem.coordinator.updates.server_optimizer import ServerStep, server_optimizer
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import (
    FEDERATED,
    MIXED,
    accept,
    arrays,
    data_of,
    key,
    manifest_of,
    rounded,
    wide,
)

# A frozen tensor and a buffer between trained ones; MIXED has sizes 0, 1 and odd ones.
LAYOUT = [*MIXED[:2], ("model/frozen", "float32", (7,)), *MIXED[2:], ("model/mean", "float32", ())]
AVERAGED = ("model/frozen", "model/mean")
MANIFEST = manifest_of(LAYOUT, metadata={"averaged": '["model/frozen", "model/mean"]'})
STATE, OLD, OLDER = 100, 101, 102
"""Seeds of the present state and of two earlier ones."""


def reference(weights: list[float], bases: dict[int, int], *, momentum: bool = False) -> bytes:
    """Clients 0, 1, … of which some have a base of their own, by seed."""
    clients = [arrays(MANIFEST, seed) for seed in range(len(weights))]
    states = {seed: arrays(MANIFEST, seed) for seed in {STATE, *bases.values()}}
    on_time = [index for index in range(len(weights)) if index not in bases]
    out = []
    for spec in MANIFEST.stored():
        if not dtype_named(spec.dtype).is_floating:
            largest = max(on_time, key=lambda i: (weights[i], -i))
            out.append(clients[largest][spec.name])
            continue
        is_trained = spec.name not in AVERAGED
        state = wide(spec.dtype, states[STATE][spec.name])
        total = np.zeros(state.shape)
        for index, weight in enumerate(weights):
            values = wide(spec.dtype, clients[index][spec.name])
            if index in bases and is_trained:
                values = values - wide(spec.dtype, states[bases[index]][spec.name]) + state
            total = total + values * weight
        mean = total / math.fsum(weights)
        if momentum and is_trained:
            mean = state + 1.0 * (0.5 * np.zeros(state.shape) + (mean - state))
        out.append(rounded(spec.dtype, mean))
    return b"".join(raw.tobytes() for raw in out)


class LateRound(Round):
    """A round with the states that its clients may have begun from."""

    def __init__(self, root: Path, manifest: Manifest = MANIFEST) -> None:
        super().__init__(root, manifest)
        self.states = {seed: self.stored(data_of(manifest, seed)) for seed in (STATE, OLD, OLDER)}

    def rebased(self, weights: list[float], bases: dict[int, int], **options: Any) -> bytes:
        late = {client: self.states[seed] for client, seed in bases.items()}
        rebasing = Rebasing(self.store, self.states[STATE], late)
        entries = self.accepted(len(weights))
        return self.folded(entries, weights, rebasing=rebasing, **options)


CASES = [
    ([3.0, 0.5], {1: OLD}),
    ([0.25, 4.0, 2.5, 1.0], {0: OLDER, 2: OLD}),
    ([7.0, 9.0], {1: OLD}),
]


@pytest.mark.parametrize("window", [1, 7, fold.WINDOW_ELEMENTS])
@pytest.mark.parametrize(("weights", "bases"), CASES)
def test_late_updates_enter_with_what_they_have_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float],
    bases: dict[int, int],
    window: int,
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", window)
    with capture_logs() as said:
        assert LateRound(tmp_path).rebased(weights, bases) == reference(weights, bases)
    if len(weights) == 1 + len(bases):
        assert said == [], "who is late has no say about integers"


def test_a_server_optimizer_gets_the_mean_of_what_was_rebased(tmp_path: Path) -> None:
    a_round = LateRound(tmp_path)
    options = {"server_optimizer": {"name": "fedavgm", "momentum": 0.5}}
    optimizer = server_optimizer(parse_strategy({**FEDERATED, "options": options}))  # type: ignore[arg-type]
    assert optimizer is not None
    server = ServerStep(optimizer, a_round.store, a_round.states[STATE], (), {})
    weights, bases = CASES[1]
    expected = reference(weights, bases, momentum=True)
    assert a_round.rebased(weights, bases, server=server) == expected


def test_a_client_that_has_changed_nothing_changes_nothing(tmp_path: Path) -> None:
    """Its whole model would pull the state back to where it was."""
    a_round = LateRound(tmp_path, manifest_of([("w", "float64", (5,))]))
    for client, seed in enumerate((STATE, OLD)):
        accept(a_round.spool, client, a_round.manifest, data_of(a_round.manifest, seed))
    rebasing = Rebasing(a_round.store, a_round.states[STATE], {1: a_round.states[OLD]})
    found = a_round.folded(a_round.entries(), [1, 1], rebasing=rebasing)
    assert found == data_of(a_round.manifest, STATE)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_what_was_not_finite_in_its_own_base_takes_no_part(tmp_path: Path, is_buffer: bool) -> None:
    """The client was accepted with it, as no fault of its own, and the state is finite by now."""
    metadata = {"averaged": '["w"]'} if is_buffer else {}
    manifest = manifest_of([("w", "float32", (2,))], metadata=metadata)
    a_round = Round(tmp_path, manifest)
    accept(a_round.spool, 1, manifest, floats(4.0, 5.0))
    writer = a_round.spool.open(key(0), manifest, before=lambda *_: np.array([np.inf, 3.0], "<f4"))
    writer.write(floats(np.inf, 3.0))
    writer.commit(manifest, 1)
    present, base = (a_round.stored(floats(*values)) for values in [(2, 5), (np.inf, 3.0)])
    rebasing = Rebasing(a_round.store, present, {0: base})
    found = a_round.folded(a_round.entries(), [1, 1], rebasing=rebasing)
    assert found == floats(3.0, 4.0 if is_buffer else 5.0)
