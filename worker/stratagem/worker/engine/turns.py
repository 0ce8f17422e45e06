"""Define the turns of a step: separate updates, each with its objective and optimizer.

A step of a job without turns has one turn, of all trained parameters. The module does not know how
gradients are made and reduced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.common.job.optimizer import TurnSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.engine.apply_step import (
    ReportedRates,
    StepPlace,
    StepPolicy,
    after_hook,
    apply_step,
)
from stratagem.worker.engine.callbacks import Callbacks
from stratagem.worker.engine.forward_backward import Counted, LoggedSums, Passes, Rows, Window
from stratagem.worker.engine.optimizers import OptimizersInOrder, make_optimizer
from stratagem.worker.engine.reports import StepReport
from stratagem.worker.objectives.step_function import step_functions
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Parameters of each turn ----
#
# Every trained parameter belongs to exactly one turn.

NamedParams = Sequence[tuple[str, nn.Parameter]]


def by_turn(
    turns: Sequence[TurnSpec], params: NamedParams
) -> list[tuple[TurnSpec, list[tuple[str, nn.Parameter]]]]:
    """Return each turn (one of the updates of a step) with the parameters that it trains."""
    return [(turn, [(n, p) for n, p in params if turn.holds(n)]) for turn in turns]


def make_optimizer_of(
    job: JobSpec, params: NamedParams, entrypoints: EntryPoints
) -> torch.optim.Optimizer:
    """Make a new optimizer of these parameters as the job defines it; with turns, one per turn."""
    fused = job.execution.fusion
    if job.turns is None:
        return make_optimizer(job.optimizer, params, fused=fused, entrypoints=entrypoints)
    parts = [
        make_optimizer(turn.optimizer, turn_params, fused=fused, entrypoints=entrypoints)
        for turn, turn_params in by_turn(job.turns, params)
    ]
    return OptimizersInOrder(parts)


# ---- Turns ----


@dataclass(frozen=True, slots=True)
class StepTurn:
    """A turn: one of the updates that make a step."""

    params: NamedParams
    """The parameters that the turn trains."""
    passes: Passes
    policy: StepPolicy
    name: str = ""
    """The name of the turn; empty if the step has only one."""
    number: int | None = None
    """The index of the turn in the step, from 0; None if the step has only one."""

    @property
    def key(self) -> tuple[int, ...]:
        """The turn's part of the key of random numbers, after the step's; empty without turns."""
        return () if self.number is None else (self.number,)

    def begin(self, params: NamedParams) -> None:
        """Freeze all of the parameters but the turn's, and drop all gradients."""
        if self.number:
            failpoint("worker.turns.after_turn")
        param_ids = {id(param) for _, param in self.params}
        for _, param in params:
            param.requires_grad_(id(param) in param_ids)
            param.grad = None


def make_turns(
    job: JobSpec, entrypoints: EntryPoints, passes: Passes, policy: StepPolicy, named: NamedParams
) -> list[StepTurn]:
    """Make the turns of a job's steps. policy: the policy of the whole step; the weight average is
    updated after the last turn."""
    if job.turns is None:
        return [StepTurn(named, passes, policy)]
    assert isinstance(policy.optimizer, OptimizersInOrder)
    objectives, turns = step_functions(job, entrypoints), []
    parts = zip(by_turn(job.turns, named), objectives, policy.optimizer.parts, strict=True)
    for number, ((spec, turn_params), objective, optimizer) in enumerate(parts):
        own_policy = replace(
            policy,
            job=job.altered(optimizer=spec.optimizer),
            params=[param for _, param in turn_params],
            optimizer=optimizer,
            rates=ReportedRates(spec.optimizer, spec.name),
            average=policy.average if number + 1 == len(job.turns) else None,
        )
        own_passes = replace(passes, objective=objective)
        turns.append(StepTurn(turn_params, own_passes, own_policy, spec.name, number))
    return turns


def unfreeze(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """End the turns of a step: make all these parameters trainable again."""
    for _, param in params:
        param.requires_grad_(True)


def logged_of(turn: StepTurn, loss: float, num_rows: float, logged: LoggedSums) -> LoggedSums:
    """Return a turn's logged values and its loss, with the turn's name appended to their names."""
    turn_sums = {f"{name}.{turn.name}": sums for name, sums in logged.items()}
    return {f"loss.{turn.name}": (loss * num_rows, num_rows), **turn_sums}


def whole_step(turns: Sequence[StepTurn], reports: Sequence[StepReport]) -> StepReport:
    """Combine the reports of a step's turns; the loss is the sum of their losses."""
    num_skipped = sum(report.num_skipped for report in reports)
    rows = float(reports[0].num_rows)
    logged: LoggedSums = {}
    for turn, report in zip(turns, reports, strict=True):
        if not report.num_skipped:
            logged = {**logged, **logged_of(turn, report.loss, rows, report.logged)}
    return replace(
        reports[-1],
        loss=sum(report.loss for report in reports),
        weight=0.0 if num_skipped else rows,
        grad_norm=max(report.grad_norm for report in reports),
        num_skipped=num_skipped,
        learning_rates={k: v for report in reports for k, v in report.learning_rates.items()},
        logged=logged,
        exchange_wait_s=sum(report.exchange_wait_s for report in reports),
    )


# ---- Local step ----
#
# A gossip node and a federated client take this step of a model that is not shared. Its window of
# micro-batches is one transaction: if it raises or is not finite, parameters, optimizer and buffers
# stay as they were.


@dataclass(frozen=True, slots=True)
class LocalReport:
    """The outcome of a local step. grad_norm: 2-norm before clipping. learning_rates: keyed by
    series."""

    counted: Counted
    grad_norm: float
    num_skipped: int
    """Number of turns that were skipped because loss or gradient was not finite."""
    learning_rates: Mapping[str, float]

    @property
    def is_skipped(self) -> bool:
        """True if any turn was skipped: the step then adds nothing to the sums."""
        return self.num_skipped > 0


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Makes the steps of a model that is trained separately. Used by one thread."""

    turn: StepTurn
    must_divide: bool
    """True to use the gradient of the mean over all rows, false for the sum."""
    callbacks: Callbacks
    protected: Callable[[Rows, Window], Counted] | None = None
    """Computes privacy-protected gradients instead of the plain ones; None for plain ones."""

    def run(
        self,
        rows: Rows,
        window: Window,
        place: StepPlace,
        step: int,
        pull: Callable[[], None] = lambda: None,
    ) -> LocalReport:
        """Make one step over these rows. step: from 1, for callbacks. pull: called before the
        update, may change the mean gradient."""
        policy = self.turn.policy
        policy.begin()
        try:
            if self.protected is None:
                counted = self.turn.passes.add_mean(rows, window, must_divide=self.must_divide)
            else:
                counted = self.protected(rows, window)
            pull()
            summarize = partial(policy.summarize, counted.loss, counted.weight)
            hook = None
            if self.callbacks.takes_gradients:
                hook = partial(self._call_hook, rows, window, step)
            summary = after_hook(summarize(), hook, summarize)
        except BaseException:
            policy.undo()
            raise
        applied = apply_step(summary, policy, place)
        num_skipped = int(not applied.is_applied)
        return LocalReport(counted, summary.norm.item(), num_skipped, applied.learning_rates)

    def _call_hook(self, rows: Rows, window: Window, step: int) -> None:
        """Call the user's gradient hook before the gradients are applied."""
        key, randomness = window.key(0), self.turn.passes.randomness
        self.callbacks.take_gradients(self.turn.params, step, key, randomness, rows.activity)


def whole_local_step(
    turns: Sequence[StepTurn], reports: Sequence[LocalReport], num_rows: int
) -> LocalReport:
    """Combine the reports of a step's turns; the loss, a mean over rows, is the sum of their
    losses."""
    if len(turns) == 1:
        return reports[0]
    logged: LoggedSums = {}
    for turn, report in zip(turns, reports, strict=True):
        counted = report.counted
        logged = {**logged, **logged_of(turn, counted.loss, num_rows, counted.logged)}
    loss = sum(report.counted.loss for report in reports)
    return LocalReport(
        Counted(loss * num_rows, num_rows, logged=logged),
        max(report.grad_norm for report in reports),
        sum(report.num_skipped for report in reports),
        {name: rate for report in reports for name, rate in report.learning_rates.items()},
    )
