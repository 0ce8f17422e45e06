"""Protected rows: a round of the engine is that of a loop over rows, whatever the sizes."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.privacy.noise import seeded_secret
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.federated import row_privacy
from stratagem.worker.federated.client_trainer import ClientRound, ClientRunner, RoundSettings
from stratagem.worker.federated.row_privacy import RowNoise
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from tests.jobs import user_data
from tests.reference.private_rows import private_steps
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.support import ALLOWED, CPU, trainer_of

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Batched products have other last bits than those of single rows."""


def protected(model: Any = "mlp", norm: float = 0.5, noise: float = 0.3, **changes: Any) -> Any:
    section = {
        "unit": "row",
        "clip": {"norm": norm},
        "noise_multiplier": noise,
        "target": {"delta": 1e-5},
        "noise": "seeded",
    }
    return federated(model, privacy=section, **changes)


def base_of(spec: Any) -> dict[str, Tensor]:
    return {name: t for name, t in trainer_of(spec).copy_state()[0].items() if "model/" in name}


def trained(spec: Any, round_num: int = 2) -> ClientRound:
    """A round of client 1 of 3."""
    own = RowNoise(seeded_secret(spec.seed), (str(round_num), "1"), is_seeded=True)
    runner = ClientRunner(spec, ALLOWED, CPU)
    return runner.run(base_of(spec), 1, 3, round_num, settings=RoundSettings(row_noise=own))


RECURRENT = "tests.userland.models:recurrent"
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": ({}, "mlp"),
    "two epochs of small batches": ({"local_epochs": 2, "batch_size": 3}, "mlp"),
    "mostly empty batches": ({"batch_size": 1, "data": user_data("classes", num_rows=21)}, "mlp"),
    "one row": ({"data": user_data("classes", num_rows=3)}, "mlp"),
    "seven rows, all in each step": ({"data": user_data("classes", num_rows=21)}, "mlp"),
    "nothing is clipped": ({"norm": 1000.0, "noise": 0.1}, "mlp"),
    "some is clipped": ({"norm": 2.0}, "mlp"),
    "float64": ({"execution": {"precision": "Full"}}, "mlp"),
    "frozen parameters": ({}, "frozen_start"),
    **{
        f"a model with {kind}": ({}, {"entrypoint": RECURRENT, "kwargs": {"kind": kind}})
        for kind in ("RNN", "GRU", "LSTM", "GRUCell", "LSTMCell")
    },
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, for LSTM
@pytest.mark.parametrize("case", CASES)
def test_a_round_is_that_of_the_loop_over_rows(case: str) -> None:
    changes, model = CASES[case]
    spec = protected(model, **changes)
    done = trained(spec)
    plain, base = build_model(spec, ALLOWED, device=CPU, fresh=True), base_of(spec)
    plain.load_state_dict({name.removeprefix("model/"): t for name, t in base.items()})
    share = load_data(spec, ALLOWED, DataSources(), ClientShare(1, 3))["train"]
    gather, key = Gather(rows_dtype(spec, plain), CPU), BatchKeys(("row",))
    x, y = gather(share, torch.arange(len(share)), "reading", key)
    drawn = private_steps(spec, plain, (x, y), 1, 2)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(done.tensors[f"model/{name}"], tensor, **CLOSE)  # type: ignore[arg-type]
    assert done.num_steps == len(drawn)
    assert done.num_samples == len(x)
    if case == "mostly empty batches":
        assert 0 in drawn
    if case == "frozen parameters":
        frozen = {f"model/{name}" for name, p in plain.named_parameters() if not p.requires_grad}
        assert frozen
        assert all(torch.equal(done.tensors[name], base[name]) for name in frozen)


def test_rows_a_few_at_a_time_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = trained(protected()).tensors
    monkeypatch.setattr(row_privacy, "_MAX_ROWS", 3)
    for name, tensor in trained(protected()).tensors.items():
        torch.testing.assert_close(tensor, at_once[name], **CLOSE)  # type: ignore[arg-type]


def test_rows_one_after_the_other_are_the_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for models that torch does not run for many rows at once."""
    at_once = trained(protected()).tensors
    monkeypatch.setattr(row_privacy, "_ONE_BY_ONE", (torch.nn.Linear,))
    monkeypatch.delattr(row_privacy, "vmap")
    for name, tensor in trained(protected()).tensors.items():
        torch.testing.assert_close(tensor, at_once[name], **CLOSE)  # type: ignore[arg-type]


def test_done_again_it_is_the_same_to_the_bit_and_another_round_is_not() -> None:
    spec = protected("dropout_mlp")
    first, again, other = trained(spec), trained(spec), trained(spec, round_num=3)
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert not any(torch.equal(first.tensors[name], other.tensors[name]) for name in first.tensors)


def test_dropout_masks_differ_between_rows() -> None:
    """One mask for all rows of a batch would make them depend on each other's place."""
    torch.manual_seed(0)
    masks = torch.func.vmap(torch.nn.functional.dropout, randomness="different")(torch.ones(8, 64))
    assert len({tuple(mask.tolist()) for mask in masks}) == 8


def test_a_row_that_is_not_finite_counts_as_zero() -> None:
    """An error, or a step that is left out, would tell that the row was drawn."""
    spec = protected(loss={"entrypoint": "tests.userland.losses:infinite_loss"}, noise=1.0)
    done, base = trained(spec), base_of(spec)
    moved = {name: t - base[name] for name, t in done.tensors.items()}
    assert all(t.isfinite().all() for t in moved.values())
    assert all((t != 0).any() for t in moved.values())
    assert done.metrics.get("skipped_steps", 0) == 0


def test_no_row_moves_a_step_by_more_than_the_norm() -> None:
    """Of two clients that differ in one row, whatever its values are; with the least noise."""
    states = []
    for poisoned in (-1, 1):
        data = user_data("poisoned", poisoned_client=poisoned)
        sgd = {"name": "sgd", "lr": 1.0}
        spec = protected(norm=0.01, noise=0.1, batch_size=50, optimizer=sgd, data=data)
        states.append(trained(spec).tensors)
    before, after = states
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in before) ** 0.5
    assert 0 < moved <= 2 * 0.01 / 16 * 1.001


BATCH_NORM = '"1" is BatchNorm1d, which mixes the rows of a batch'


def test_batch_norm_is_refused_by_name_once_the_model_is_built() -> None:
    with pytest.raises(InvalidInputError, match=re.escape(BATCH_NORM)):
        ClientRunner(protected("batch_norm_mlp"), ALLOWED, CPU)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("word", "str"), (torch.tensor(3), r"shape \(\)"), (torch.zeros(2, 3), r"shape \(2, 3\)")],
)
def test_parts_without_a_number_for_each_row_are_refused(part: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"a batch of 3 rows has a part of {kind}; privacy"):
        row_privacy._check_rows([torch.zeros(3), part], 3)


def noise_of(names: tuple[str, ...] = ("round", "base"), **changes: Any) -> RowNoise:
    return RowNoise(bytes(32), names, **changes)


def numbers(noise: RowNoise) -> list[float]:
    return list(noise.of_tensor(0, "weight", 4))


def test_noise_is_of_the_rows_that_were_read_and_of_all_that_they_were_read_for() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 0, 2])
    plain = numbers(noise_of().after([x, y]))
    assert plain == numbers(noise_of().after([x.clone(), y]))
    changed = x.clone()
    changed[2, 1] += 1
    others: Mapping[str, RowNoise] = {
        "a row": noise_of().after([changed, y]),
        "one row less": noise_of().after([x[:2], y[:2]]),
        "a shape": noise_of().after([x.reshape(2, 3), y]),
        "a type": noise_of().after([x, y.int()]),
        "an earlier step": noise_of().after([changed, y]).after([x, y]),
        "the base": noise_of(("round", "other")).after([x, y]),
        "the cut of names": noise_of(("roundbase",)).after([x, y]),
        "the secret": RowNoise(b"x" * 32, ("round", "base")).after([x, y]),
    }
    seen = {name: numbers(noise) for name, noise in others.items()}
    assert all(drawn != plain for drawn in seen.values())
    assert numbers(noise_of().after([x, y])) != list(
        noise_of().after([x, y]).of_tensor(1, "weight", 4)
    )
    assert numbers(noise_of(is_seeded=True).after([changed, y])) == numbers(
        noise_of(is_seeded=True)
    )


def test_each_row_is_drawn_by_itself_with_the_rate() -> None:
    noise = noise_of()
    draws = [set(noise.drawn(step, 200, 0.1).tolist()) for step in range(400)]
    share = sum(map(len, draws)) / (200 * 400)
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / (200 * 400)) ** 0.5
    assert len({frozenset(rows) for rows in draws}) == 400
    together = sum({3, 4} <= rows for rows in draws) / 400
    assert abs(together - 0.01) < 4 * (0.01 * 0.99 / 400) ** 0.5
    assert noise.drawn(0, 5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert len(noise.drawn(0, 5, 1e-9)) == 0
