"""The fold of a private round against plain numpy, for all types and any windows."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.base.ids import Digest
from stratagem.common.privacy.gaussian_noise import derived_key, standard_normal
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.safetensors_file import header_bytes, read_header
from stratagem.coordinator.core.facts import ROOT, RoundAccounted
from stratagem.coordinator.updates.folding import fold as folding
from stratagem.coordinator.updates.folding.fold import fold_weighted_mean
from stratagem.coordinator.updates.numpy_floats import narrow, storage, widen
from stratagem.coordinator.updates.privacy.private_mean import PrivateMean
from stratagem.coordinator.updates.privacy.round_noise import (
    FROZEN_KEY,
    TensorNoise,
    drawn_clients,
    noised_share,
)
from stratagem.coordinator.updates.state_reader import open_state
from tests.coordinator.updates.fold_round import FOLDER, Round
from tests.coordinator.updates.updates import accept, data_of

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


def base_of(folded: Round, client: int = 9) -> tuple[Digest, bytes]:
    """A stored state, and its data."""
    data = data_of(folded.manifest, client)
    writer = folded.writer()
    writer.write(header_bytes(folded.manifest))
    writer.write(data)
    return writer.commit(), data


def private_fold(folded: Round, num_clients: int, base: Digest) -> bytes:
    for client in range(num_clients):
        accept(folded.spool, client, folded.manifest, data_of(folded.manifest, client))
    entries = list(folded.spool.entries(*FOLDER).values())
    with ExitStack() as files:
        _, state = open_state(files, folded.store, base)
        noise = TensorNoise(SECRET, NAME, folded.manifest)
        digest, *_ = fold_weighted_mean(
            entries,
            [7.0] * num_clients,
            folded.manifest,
            folded.writer(),
            combination=PrivateMean(noise, account(), state),
        )
    _, start = read_header(folded.store.path(digest))
    return folded.store.path(digest).read_bytes()[start:]


def values_of(dtype: str, data: bytes) -> np.ndarray[Any, Any]:
    raw = np.frombuffer(data, storage(dtype))
    values = np.empty(raw.size)
    widen(dtype, raw, values)
    return values


@pytest.mark.parametrize("num_clients", [0, 1, 3])
@pytest.mark.parametrize("window", [3, 1 << 18])
def test_the_sum_of_changes_is_noised_divided_by_the_expected_number_and_added_to_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_clients: int, window: int
) -> None:
    monkeypatch.setattr(folding, "WINDOW_ELEMENTS", window)
    folded = Round(tmp_path)
    base, before = base_of(folded)
    data = private_fold(folded, num_clients, base)
    grid = 2.0 ** (np.floor(np.log2(0.3)) - 20)
    for spec in folded.manifest.stored():
        at = slice(spec.offset, spec.offset + spec.size_bytes)
        if not dtype_named(spec.dtype).is_floating:
            assert data[at] == before[at]
            continue
        sent = [
            values_of(spec.dtype, data_of(folded.manifest, client)[at])
            for client in range(num_clients)
        ]
        world = values_of(spec.dtype, before[at])
        noise = standard_normal(derived_key(SECRET, ["sum", NAME, spec.name]), 0, world.size)
        total = sum(sent, np.zeros(world.size)) + 0.3 * noise
        expected = world + np.rint(total / grid) * grid / 2.5
        raw = np.empty(world.size, storage(spec.dtype))
        narrow(spec.dtype, expected, raw)
        assert data[at] == raw.tobytes(), spec.name


@pytest.mark.parametrize("window", [3, 1 << 18])
def test_frozen_parameters_get_no_noise_and_nothing_that_clients_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A backbone that nobody trains would else drift away from what it has learned."""
    monkeypatch.setattr(folding, "WINDOW_ELEMENTS", window)
    plain = Round(tmp_path / "plain").manifest
    floats = [s for s in plain.stored() if dtype_named(s.dtype).is_floating and s.size_bytes]
    frozen = [spec.name for spec in floats[::2]]
    marked = replace(plain, metadata={**plain.metadata, FROZEN_KEY: json.dumps(frozen)})
    noised, kept = Round(tmp_path / "all", plain), Round(tmp_path / "some", marked)
    base, before = base_of(kept)
    data, others = private_fold(kept, 2, base), private_fold(noised, 2, base_of(noised)[0])
    assert len(frozen) < len(floats)
    for spec in floats:
        at = slice(spec.offset, spec.offset + spec.size_bytes)
        assert data[at] == (before[at] if spec.name in frozen else others[at]), spec.name
        assert before[at] != others[at]


def test_a_fold_that_is_done_again_has_the_same_noise(tmp_path: Path) -> None:
    first, second = Round(tmp_path / "a"), Round(tmp_path / "b")
    made = private_fold(first, 2, base_of(first)[0])
    assert made == private_fold(second, 2, base_of(second)[0])


def test_noise_of_tensors_is_found_by_their_place(tmp_path: Path) -> None:
    manifest = Round(tmp_path).manifest
    noise = TensorNoise(SECRET, NAME, manifest)
    floats = [s for s in manifest.stored() if dtype_named(s.dtype).is_floating and s.size_bytes]
    for spec in floats:
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
