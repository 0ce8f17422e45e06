"""The fold of a private round against plain numpy, for all types and any windows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.privacy.noise import derived_key, standard_normal
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.coordinator.core.facts import ROOT, RoundAccounted
from stratagem.coordinator.effects.private import (
    FROZEN_KEY,
    PrivateMean,
    TensorNoise,
    drawn_clients,
    noised_share,
)
from stratagem.coordinator.updates import fold as folding
from tests.coordinator.updates.fold_round import BASE, Round
from tests.coordinator.updates.updates import arrays, elements, rounded, wide

SECRET = bytes(range(32))
NAME = "run.s/root/3"


def account(**changes: Any) -> RoundAccounted:
    values = {
        "party": ROOT,
        "round_num": 3,
        "drawn": (0, 1),
        "sampling_rate": 0.5,
        "num_expected": 2.5,
        "clip_norm": 1.0,
        "noise_multiplier": 0.3,
        "sum_noise": 0.3,
        "answer_noise": 0.0,
        "epsilon": 1.0,
        "delta": 1e-5,
        "accountant": "none",
        "fingerprint": "f",
    }
    return RoundAccounted(**{**values, **changes})


def private_fold(folded: Round, num_clients: int) -> bytes:
    folded.begin()
    noise, weights = TensorNoise(SECRET, NAME, folded.manifest), [7.0] * num_clients
    with folded.opened() as (_, state):
        rule = PrivateMean(noise, account(), state)
        return folded.folded(folded.accepted(num_clients), weights, combination=rule)


def parts(manifest: Manifest, seed: int) -> dict[str, Any]:
    """The elements of floating tensors that a client or a state has, by name."""
    found = arrays(manifest, seed)
    return {each.name: wide(each.dtype, found[each.name]) for each in floats_of(manifest)}


def floats_of(manifest: Manifest) -> list[TensorSpec]:
    return [each for each in manifest.stored() if dtype_named(each.dtype).is_floating]


@pytest.mark.parametrize(("num_clients", "window"), [(0, 3), (1, 1 << 18), (3, 3), (7, 1 << 18)])
def test_the_sum_of_changes_is_noised_divided_by_the_expected_number_and_added_to_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_clients: int, window: int
) -> None:
    monkeypatch.setattr(folding, "WINDOW_ELEMENTS", window)
    folded = Round(tmp_path)
    expected, manifest = arrays(folded.manifest, BASE), folded.manifest
    grid = 2.0 ** (np.floor(np.log2(0.3)) - 20)
    sent = [parts(manifest, client) for client in range(num_clients)]
    for spec in floats_of(manifest):
        world = parts(manifest, BASE)[spec.name]
        noise = standard_normal(derived_key(SECRET, ["sum", NAME, spec.name]), 0, world.size)
        total = sum((each[spec.name] for each in sent), np.zeros(world.size)) + 0.3 * noise
        expected[spec.name] = rounded(spec.dtype, world + np.rint(total / grid) * grid / 2.5)
    found = elements(manifest, private_fold(folded, num_clients))
    for name, raw in expected.items():
        assert found[name].tobytes() == raw.tobytes(), name


@pytest.mark.parametrize("window", [3, 1 << 18])
def test_frozen_parameters_get_no_noise_and_nothing_that_clients_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A backbone that nobody trains would else drift away from what it has learned."""
    monkeypatch.setattr(folding, "WINDOW_ELEMENTS", window)
    plain = Round(tmp_path / "plain").manifest
    names = [spec.name for spec in floats_of(plain) if spec.size_bytes]
    metadata = {**plain.metadata, FROZEN_KEY: json.dumps(names[::2])}
    rounds = (
        Round(tmp_path / "all", plain),
        Round(tmp_path / "some", replace(plain, metadata=metadata)),
    )
    others, kept = (elements(plain, private_fold(each, 2)) for each in rounds)
    before = arrays(plain, BASE)
    for name in names:
        expected = before if name in names[::2] else others
        assert kept[name].tobytes() == expected[name].tobytes(), name
        assert before[name].tobytes() != others[name].tobytes()


def test_noise_of_tensors_is_found_by_their_place(tmp_path: Path) -> None:
    manifest = Round(tmp_path).manifest
    noise = TensorNoise(SECRET, NAME, manifest)
    for spec in floats_of(manifest):
        if not spec.size_bytes:
            continue
        size = dtype_named(spec.dtype).item_bytes
        num = spec.size_bytes // size
        whole = standard_normal(derived_key(SECRET, ["sum", NAME, spec.name]), 0, num)
        np.testing.assert_array_equal(noise.read(spec.dtype, spec.offset, num), whole)
        last = noise.read(spec.dtype, spec.offset + (num - 1) * size, 1)
        np.testing.assert_array_equal(last, whole[-1:])


def test_each_client_is_drawn_by_itself_with_the_rate() -> None:
    candidates = range(2000)
    drawn = drawn_clients(SECRET, NAME, candidates, 0.25)
    assert abs(len(drawn) - 500) < 100
    assert drawn == drawn_clients(SECRET, NAME, candidates, 0.25)
    assert drawn != drawn_clients(SECRET, "run.s/root/4", candidates, 0.25)
    few = drawn_clients(SECRET, NAME, candidates[:1000], 0.25)
    assert few == tuple(c for c in drawn if c < 1000), "others do not change who is drawn"
    assert drawn_clients(SECRET, NAME, (3, 5), 1.0) == (3, 5)


def test_the_share_of_those_within_the_norm_is_noised() -> None:
    shares = [noised_share(SECRET, str(n), 30, 2.0, 40.0) for n in range(400)]
    assert abs(np.mean(shares) - 0.75) < 4 * 2 / 40 / 20
    assert abs(np.std(shares) - 2 / 40) < 0.01
