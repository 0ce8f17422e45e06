"""What "correct" means for phase training: one process, one loop, every rule written out.

Shares model, data, loss, optimizer and keyed randomness with the engine, and the arithmetic of one
sharded gradient; none of its state machine, history, storage or checkpoints. For models without
buffers.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec, PhasesSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import split_rows
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.order import BatchOrder
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import Result, add_in_tree, cut_rows, is_skipped, trained_of
from tests.reference.objective import objective_of
from tests.reference.plain_job import plainly
from tests.reference.rates import Rates
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import read
from tests.reference.weight_average import RunningAverage

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Cycle:
    """What the loop remembers of gradients: the last exact ones, (step, gradient) oldest first."""

    spec: PhasesSpec
    full: int
    predict: int
    numerics: int
    known: list[tuple[int, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of Full steps."""

    def remember(self, step: int, gradient: Tensor) -> None:
        keep = self.spec.predictor.history if self.spec.predictor.kind == "wls" else 2
        self.known = [*self.known, (step, gradient)][-keep:]

    def prediction(self, step: int) -> Tensor:
        """Line through the known gradients, its slope followed d + d² + … steps."""
        spec, (last_step, last) = self.spec.predictor, self.known[-1]
        damping = spec.damping if spec.kind == "wls" else spec.momentum
        powers = [damping]
        while len(powers) < step - last_step:
            powers.append(powers[-1] * damping)
        follow = 0.0
        for power in powers:
            follow += power
        t = [float(known_step - last_step) for known_step, _ in self.known]
        if len(t) == 1:
            shares = [1.0]
        elif spec.kind == "momentum":
            per_step = follow / -t[0] if t[0] else 0.0
            shares = [-per_step, 1.0 + per_step]
        else:
            w = [spec.decay**-each for each in t]
            wt = [a * b for a, b in zip(w, t, strict=True)]
            s0, s1, s2 = sum(w), sum(wt), sum(a * b for a, b in zip(wt, t, strict=True))
            shares = [
                a * ((s2 - s1 * b) + (s0 * b - s1) * follow) / (s0 * s2 - s1 * s1)
                for a, b in zip(w, t, strict=True)
            ]
        first, *rest = [g * c for c, (_, g) in zip(shares, self.known, strict=True)]
        total = sum(rest, start=first)
        length, limit = _norm(total), self.spec.trust * _norm(last)
        return total * (limit / length) if length > limit else total

    def is_good(self, exact: Tensor, predicted: Tensor) -> bool:
        a, p, difference = _norm(exact), _norm(predicted), _norm(exact - predicted)
        if difference == 0 or a == 0 or p == 0:
            return difference == 0
        cosine = (1.0 + (p / a) * (p / a) - (difference / a) * (difference / a)) / (2.0 * (p / a))
        is_close = difference / a <= self.spec.max_relative_error
        return is_close and min(1.0, cosine) >= self.spec.min_correlation

    def halve(self) -> None:
        if self.spec.adaptive.enabled:
            self.predict = min(self.predict, max(self.predict // 2, self.spec.predict_limits[0]))

    def has_risen(self, share: float) -> bool:
        """Between the last two windows; under 2 also slowly, between longer ones or halves, if by
        more than two standard errors and, at half the speed at least, between the last two."""
        losses, window = self.losses[-100:], self.spec.adaptive.window
        fast = _change(losses, window)
        if fast > share or self.numerics < 2:
            return fast > share
        half = len(losses) // 2
        sizes = {window * 2**power for power in range(1, 7)} & set(range(half))
        sizes |= {half} if len(losses) >= window and half >= 4 else set()
        for size in sizes:
            older, newer = losses[-2 * size : -size], losses[-size:]
            variances = [sum((x - sum(s) / size) ** 2 for x in s) / size for s in (older, newer)]
            rise = sum(newer) / size - sum(older) / size
            is_clear = rise > 2 * math.sqrt(sum(variances) / size)
            slow = _change(losses, size)
            goes_on = len(losses) < 2 * window or fast > slow * window / size / 2
            if slow > share and is_clear and goes_on:
                return True
        return False

    def adapt(self) -> None:
        spec, window = self.spec, self.spec.adaptive.window
        if not spec.adaptive.enabled:
            return
        change = _change(self.losses[-100:], window)
        full_tenth, predict_tenth = -(-spec.full_steps // 10), -(-spec.predict_steps // 10)
        if self.has_risen(spec.adaptive.loss_threshold):
            self.full = max(self.full, min(self.full + 2 * full_tenth, spec.full_limits[1]))
            least = spec.predict_limits[0]
            self.predict = min(self.predict, max(int(self.predict * 0.75), least))
        elif change < -0.05:
            self.full = min(self.full, max(self.full - full_tenth, spec.full_limits[0]))
            most = spec.predict_limits[1]
            self.predict = max(self.predict, min(self.predict + predict_tenth, most))


@dataclass(frozen=True, slots=True)
class PhasesResult:
    """Where the loop ended, and the first letter of each step's phase."""

    result: Result
    phases: str


def phases_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    num_shards: int,
    num_steps: int,
    numerics: int = CURRENT,
) -> PhasesResult:
    """Cycles of exact steps, predictions and corrections, each written where it happens."""
    spec = job.phases
    assert spec is not None
    steps = _Steps(_Loop(job, entrypoints, num_shards, numerics), num_steps)
    with suppress(_Done):
        _train(_Cycle(spec, spec.full_steps, spec.predict_steps, numerics), steps)
    return PhasesResult(steps.loop.result(steps.losses), steps.letters)


class _Done(Exception):
    """All steps have been made."""


@dataclass(slots=True)
class _Steps:
    """The steps that were made; raises _Done in place of one too many."""

    loop: _Loop
    num_steps: int
    losses: list[float] = field(default_factory=list)
    letters: str = ""
    num_left_out: int = 0

    def exact(self, letter: str) -> tuple[int, Tensor]:
        """(number, gradient) of the next step that is not left out; those that are do not count."""
        while True:
            step = self._next(letter)
            gradient, loss = self.loop.gradient(step)
            self.losses.append(loss)
            if not self.loop.leaves_out(gradient, loss):
                return step - self.num_left_out, gradient
            self.num_left_out += 1

    def predict(self, cycle: _Cycle) -> None:
        step = self._next("P")
        self.losses.append(self.losses[-1])
        self.apply(cycle.prediction(step - self.num_left_out))

    def apply(self, gradient: Tensor) -> None:
        """Of the latest step."""
        self.loop.apply(len(self.losses) - 1, gradient)

    def _next(self, letter: str) -> int:
        if len(self.losses) == self.num_steps:
            raise _Done
        self.letters += letter
        return len(self.losses)


def _train(cycle: _Cycle, steps: _Steps) -> None:
    spec = cycle.spec
    warmup = spec.warmup_steps
    was_predicting = False
    while True:
        num_full, warmup = cycle.full + warmup, 0
        may_predict, forecast = False, None
        for number in range(1, num_full + 1):
            step, gradient = steps.exact("F")
            ahead = max(1, min(spec.correct_every, cycle.predict, cycle.full - 2))
            if was_predicting and not cycle.is_good(gradient, cycle.prediction(step)):
                cycle.halve()
            if number == num_full and forecast is not None:
                is_good_near = cycle.is_good(gradient, cycle.prediction(step))
                may_predict = is_good_near and cycle.is_good(gradient, forecast)
            cycle.remember(step, gradient)
            cycle.losses.append(steps.losses[-1])
            may_predict = may_predict and not cycle.has_risen(0.2)
            if cycle.predict and number == num_full - ahead:
                forecast = cycle.prediction(step + ahead)
            steps.apply(gradient)
            was_predicting = False
        since_exact, predicted = 0, 0
        while may_predict and predicted < cycle.predict:
            if since_exact < spec.correct_every:
                steps.predict(cycle)
                since_exact, predicted, was_predicting = since_exact + 1, predicted + 1, True
                continue
            step, gradient = steps.exact("C")
            prediction = cycle.prediction(step)
            is_good = cycle.is_good(gradient, prediction)
            weight = spec.correction_weight if is_good else 0.0
            steps.apply(gradient + (gradient - prediction) * weight)
            cycle.remember(step, gradient)
            may_predict = is_good and not _is_spike(cycle.losses, steps.losses[-1], spec)
            if not may_predict:
                cycle.halve()
            since_exact, was_predicting = 0, False
        cycle.adapt()


def _is_spike(before: list[float], loss: float, spec: PhasesSpec) -> bool:
    """Three standard deviations above the mean of the last Full steps."""
    baseline = before[-spec.adaptive.window :]
    if len(baseline) < max(spec.adaptive.window, 2):
        return False
    mean = sum(baseline) / len(baseline)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in baseline) / len(baseline))
    return loss - mean > 3 * max(deviation, 1e-6 * abs(mean))


def _change(losses: list[float], window: int) -> float:
    """Of the mean, between the last two windows, relative to the older one; 0 for too few."""
    if len(losses) < 2 * window:
        return 0.0
    older, newer = sum(losses[-2 * window : -window]) / window, sum(losses[-window:]) / window
    return (newer - older) / abs(older)


class _Loop:
    """Model, data and optimizer; gradients come and go as one flat tensor (N,)."""

    def __init__(
        self, job: JobSpec, entrypoints: EntryPoints, num_shards: int, numerics: int
    ) -> None:
        self._job, self._num_shards, self._numerics = job, num_shards, numerics
        self._data = load_data(job, entrypoints, DataSources())["train"]
        self._model = build_model(job, entrypoints, device=_CPU, fresh=True)
        self._loss = objective_of(job, entrypoints)
        self._gather = Gather(rows_dtype(job, self._model), _CPU)
        self._params = [param for param in self._model.parameters() if param.requires_grad]
        named = trained_of(self._model)
        self._optimizer = make_optimizer(
            job.optimizer, named, fused=job.execution.fusion, entrypoints=entrypoints
        )
        self._randomness = KeyedRandomness(self._model, _CPU)
        self._execution = prepare(self._model, plainly(job), _CPU, self._randomness)
        self._scale = self._execution.scale
        self._order = BatchOrder(len(self._data), job.batch_size, job.seed)
        steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch
        self._rates = Rates(job, self._optimizer, steps, entrypoints)
        self._reached = [True] * len(self._params)
        self._average = RunningAverage(job.weight_average, self._params)

    def gradient(self, step: int) -> tuple[Tensor, float]:
        """(mean gradient, mean loss) of the step's batch, shards added in the tree."""
        epoch, batch = self._order.batch(step)
        row_key = (self._job.seed, "row", epoch)
        self._execution.begin_batch(len(batch))
        parts: list[list[Tensor]] = []
        self._reached = [False] * len(self._params)
        for shard, rows in enumerate(split_rows(len(batch), self._num_shards)):
            if not rows:
                continue
            for param in self._params:
                param.grad = None
            weight, loss = torch.zeros(2, dtype=torch.float64).unbind()
            micro_batches = cut_rows(self._job, batch[rows.start : rows.stop], None)
            for micro_batch, indices in enumerate(micro_batches):
                key = (self._job.seed, step, shard, micro_batch)
                x, y = read(self._gather, self._data, indices, row_key, key, self._randomness)
                value = self._loss(self._model, x, y, len(indices))
                root = value.mean * value.weight
                self._scale.up(root).backward()
                weight += value.weight
                loss += value.mean.detach().double() * value.weight
            parts.append([weight, loss, *map(_gradient_of, self._params)])
            for index, param in enumerate(self._params):
                self._reached[index] |= param.grad is not None
        sums = [add_in_tree([part[index] for part in parts]) for index in range(len(parts[0]))]
        divisor = self._scale.value
        if self._job.window.must_divide:
            divisor *= sums[0].item()
        flat = torch.cat([each.reshape(-1) / divisor for each in sums[2:]])
        return flat, (sums[1] / sums[0]).item()

    def leaves_out(self, gradient: Tensor, loss: float) -> bool:
        """Whether the job leaves a step with this gradient out."""
        self._spread(gradient)
        return is_skipped(self._job, loss, self._params, self._scale)

    def _spread(self, gradient: Tensor) -> None:
        parts = gradient.split_with_sizes([param.numel() for param in self._params])
        for param, part, reached in zip(self._params, parts, self._reached, strict=True):
            param.grad = part.reshape(param.shape).clone() if reached else None

    def apply(self, step: int, gradient: Tensor) -> None:
        """One optimizer step."""
        self._spread(gradient)
        self._rates.before(step)
        norm = gradient_norm(self._params, self._numerics)
        clip(self._params, self._job.optimizer.clip_norm, norm)
        self._optimizer.step()
        self._rates.after()
        self._average.update(step + 1)

    def result(self, losses: list[float]) -> Result:
        average = self._average.model_state(self._model)
        return Result(self._model.state_dict(), losses, average)


def _gradient_of(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.clone()


def _norm(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))
