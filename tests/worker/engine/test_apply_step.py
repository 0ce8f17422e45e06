"""The end of a step by itself: what one update makes of given gradients, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.engine.apply_step import (
    ReportedRates,
    StepPlace,
    StepPolicy,
    StepSummary,
    apply_step,
)
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.numerics.model import CompileGate, ModelExecution
from stratagem.worker.numerics.precision import LossScale
from tests.jobs import job
from tests.worker.engine.support import CPU

SIZES = (0, 1, 7)
FINE = StepSummary(loss=1.5, weight=2.0, norm=torch.tensor(1.0), is_finite=True)


class Numbers(nn.Module):
    """Parameters of all sizes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([torch.arange(1.0, n + 1) for n in SIZES])
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))


class Step:
    """A model whose gradients are there, and how its steps end."""

    def __init__(
        self, *, clip_norm: float | None = None, may_skip: bool = False, is_scaled: bool = False
    ) -> None:
        self.model = Numbers()
        self.params = list(self.model.parameters())
        self.scale = LossScale(is_scaled, 8.0 if is_scaled else 1.0)
        buffers = Buffers(self.model, CPU)
        self.policy = StepPolicy(
            job(
                optimizer={"name": "adam", "lr": 0.1, "clip_norm": clip_norm},
                accumulation={"non_finite": "skip_step" if may_skip else "fail"},
            ),
            ModelExecution(16, CompileGate(), self.scale),
            self.params,
            torch.optim.Adam([{"params": self.params, "initial_lr": 1.0}], lr=99.0),
            buffers,
            ReportedRates(None),
            *(CURRENT, 10),
        )
        buffers.snapshot()
        self.model.seen.fill_(5.0)  # as a forward pass does
        for index, param in enumerate(self.params):
            param.grad = torch.linspace(-2.0, 3.0, param.numel()) + index

    @property
    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    @property
    def values(self) -> list[list[float]]:
        return [param.tolist() for param in self.params]

    def end(
        self,
        loss: float = 1.5,
        weight: float = 2.0,
        correct: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        summary = self.policy.summarize(loss, weight)
        place = StepPlace(0.5, "step 3", 3)
        applied = apply_step(summary, self.policy, place, correct=correct)
        return applied.is_applied


def updated(change: Callable[[list[nn.Parameter]], object] = lambda _: None) -> list[list[float]]:
    """What torch makes of the same step, after a change of the gradients."""
    step = Step()
    change(step.params)
    torch.optim.Adam(step.params, lr=0.5).step()
    return step.values


def clip(params: list[nn.Parameter]) -> None:
    """Clips to a norm of 0.25, by the norm in float64."""
    whole = torch.cat([param.grad.double() for param in params if param.grad is not None])
    nn.utils.clip_grads_with_norm_(params, 0.25, whole.norm(), foreach=False)


def drop(params: list[nn.Parameter]) -> None:
    params[1].grad = None


def keep(params: list[nn.Parameter]) -> None: ...


@pytest.mark.parametrize(
    ("change", "num_left", "frees"),
    [(keep, 3, False), (keep, 0, True), (drop, 2, False), (clip, 3, False)],
)
def test_one_update_is_torchs_with_the_rate_of_the_step(
    change: Callable[[list[nn.Parameter]], None], num_left: int, frees: bool
) -> None:
    step = Step(clip_norm=0.25 if change is clip else None)
    step.policy.execution.frees_gradients = frees
    if change is drop:
        drop(step.params)
    assert step.end()
    assert step.values == updated(change)
    assert step.model.seen.tolist() == [5.0, 5.0]  # they are the trainer's to set
    assert step.scale.num_good_steps == 1
    assert len(step.grads) == num_left


def test_a_correction_changes_gradients_and_the_norm_that_clips_them() -> None:
    step = Step(clip_norm=0.25)
    norms = []

    def correct(norm: Tensor) -> Tensor:
        norms.append(norm.item())
        for grad in step.grads:
            grad.mul_(2.0)
        return norm * 2.0

    def change(params: list[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(2.0)
        clip(params)

    expected = step.policy.summarize(1.5, 2.0).norm.item()
    assert step.end(correct=correct)
    assert norms == [expected]
    assert step.values == updated(change)


@pytest.mark.parametrize(("bad", "where"), [(math.nan, 1), (math.inf, 2), (-math.inf, 2)])
@pytest.mark.parametrize("may_skip", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(bad: float, where: int, may_skip: bool) -> None:
    step = Step(may_skip=may_skip)
    step.grads[where][-1] = bad
    if may_skip:
        assert not step.end(correct=lambda norm: pytest.fail("nothing is applied"))
    else:
        sentence = r"non-finite gradient at step 3; lower optimizer\.lr, .*; accum"
        with pytest.raises(UserCodeError, match=sentence) as caught:
            step.end()
        assert caught.value.activity == "step 3"
    assert step.values == Step().values
    assert step.model.seen.tolist() == [0.0, 0.0]
    assert step.grads == []
    assert step.scale.num_good_steps == 0


def test_a_scaled_loss_absorbs_gradients_that_are_not_finite_until_its_scale_is_least() -> None:
    step = Step(is_scaled=True)
    for loss, weight, sentence in (
        (math.nan, 2.0, "non-finite loss at step 3"),
        (math.inf, 0.0, r"non-finite loss \(nothing was counted\) at step 3"),
    ):
        with pytest.raises(UserCodeError, match=sentence):
            step.end(loss, weight)
        assert step.scale.value == 8.0  # no scale helps a loss
    step = Step(is_scaled=True)
    step.grads[1][0] = math.inf
    assert not step.end()
    assert step.scale.value == 4.0
    step.scale.value = 2.0**-14
    step.params[1].grad = torch.full((1,), math.inf)
    with pytest.raises(UserCodeError, match="non-finite gradient at step 3"):
        step.end()


def test_an_infinite_norm_of_finite_gradients_is_an_error_only_where_they_are_clipped() -> None:
    summary = replace(FINE, norm=torch.tensor(math.inf))
    step = Step()
    assert apply_step(summary, step.policy, StepPlace(0.5, "step 3")).is_applied
    assert step.values == updated()
    clipped = Step(clip_norm=1.0)
    with pytest.raises(UserCodeError, match=r"non-finite gradient norm; lower optimizer\.lr"):
        apply_step(summary, clipped.policy, StepPlace(0.5, "step 3"))


def test_a_process_without_parameters_takes_part() -> None:
    policy = replace(Step().policy, params=[], optimizer=None, buffers=None)
    assert apply_step(FINE, policy, StepPlace(0.5, "step 1")).is_applied
    assert policy.execution.scale.num_good_steps == 1


def test_an_error_of_the_optimizer_is_the_users() -> None:
    step = Step()
    step.params[1].grad = torch.ones(1).to_sparse()
    with pytest.raises(UserCodeError, match="sparse gradients") as caught:
        apply_step(FINE, step.policy, StepPlace(0.5, "step 3"))
    assert caught.value.activity == "step 3"
