"""The clipped change: one vector of all floats, never too long, exact where nothing is clipped."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stratagem.worker.federated.row_privacy import clipped_change


def norm_of(tensors: dict[str, Tensor]) -> float:
    floats = [t.double() for t in tensors.values() if t.is_floating_point()]
    return math.sqrt(math.fsum(float((t**2).sum()) for t in floats))


def state(scale: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": (torch.randn(7, 5, generator=generator) * scale).to(dtype),
        "running_mean": (torch.randn(5, generator=generator) * scale).to(dtype),
        "temperature": (torch.randn((), generator=generator) * scale).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "num_batches": torch.tensor(int(scale * 100)),
        "mask": torch.tensor([True, False]),
    }


def test_parameters_buffers_and_numbers_without_dimension_are_one_vector() -> None:
    base, trained = state(0.0), state(1.0)
    sent = clipped_change(base, trained, 0.5)
    assert not sent.is_within
    assert 0.5 * (1 - 1e-6) < norm_of(dict(sent.tensors)) <= 0.5
    factor = 0.5 / norm_of(trained)
    for name in ("weight", "running_mean", "temperature"):
        torch.testing.assert_close(sent.tensors[name], trained[name] * factor)


def test_integers_and_bools_are_those_of_the_base() -> None:
    sent = clipped_change(state(1.0), state(2.0), 0.5)
    assert sent.tensors["num_batches"].item() == 100
    assert sent.tensors["mask"].dtype == torch.bool


def test_zero_stays_zero() -> None:
    sent = clipped_change(state(1.0), state(1.0), 0.5)
    assert sent.is_within
    assert norm_of(dict(sent.tensors)) == 0.0


def test_a_short_change_is_sent_as_it_is() -> None:
    base = {"w": torch.tensor([1.0, 2.0])}
    sent = clipped_change(base, {"w": torch.tensor([1.25, 2.5])}, 0.6)
    assert sent.is_within
    assert sent.tensors["w"].tolist() == [0.25, 0.5]


@given(
    st.floats(1e-3, 1e3),
    st.floats(1e-2, 1e2),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_is_sent_is_never_longer_than_the_norm(
    norm: float, scale: float, dtype: torch.dtype
) -> None:
    sent = clipped_change(state(0.0, dtype), state(scale, dtype), norm)
    assert norm_of(dict(sent.tensors)) <= norm
    assert sent.tensors["weight"].dtype == dtype


def test_a_change_that_is_not_finite_is_left_for_the_coordinator_to_reject() -> None:
    sent = clipped_change({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, math.inf])}, 1.0)
    assert not torch.isfinite(sent.tensors["w"]).all()
    assert not sent.is_within


def test_a_mask_of_infinities_has_not_changed() -> None:
    mask = torch.tensor([0.0, -math.inf])
    sent = clipped_change({"w": mask}, {"w": mask.clone()}, 1.0)
    assert sent.tensors["w"].tolist() == [0.0, 0.0]


def test_tied_tensors_count_once_and_stay_tied() -> None:
    shared = torch.tensor([3.0, 4.0])
    sent = clipped_change({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": shared, "b": shared}, 5)
    assert sent.is_within
    assert sent.tensors["a"] is sent.tensors["b"]
