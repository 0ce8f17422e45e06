"""The turns of a step: what each of its updates trains, by which objective and optimizer.

A step of a job without turns has one, of all trained parameters. Must not know how gradients are
made and reduced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.engine.objectives.make_objective import step_functions
from stratagem.worker.engine.optim.optimizers import OptimizersInOrder
from stratagem.worker.engine.optim.reported_rates import ReportedRates
from stratagem.worker.engine.optim.turn_parameters import NamedParams, by_turn
from stratagem.worker.engine.step.apply_step import StepPolicy
from stratagem.worker.engine.step.forward_backward import Passes
from stratagem.worker.engine.step.logged_sums import LoggedSums
from stratagem.worker.engine.step.step_report import StepReport
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class StepTurn:
    """One update of each step."""

    params: NamedParams
    """What it trains."""
    passes: Passes
    policy: StepPolicy
    name: str = ""
    """Empty where a step has no other."""
    number: int | None = None
    """Its place in the step, from 0; None where a step has no other."""

    @property
    def key(self) -> tuple[int, ...]:
        """What its random numbers have in their key behind the step."""
        return () if self.number is None else (self.number,)

    def begin(self, params: NamedParams) -> None:
        """Freezes what it does not train of these parameters, and drops all gradients."""
        if self.number:
            failpoint("worker.turns.after_turn")
        own = {id(param) for _, param in self.params}
        for _, param in params:
            param.requires_grad_(id(param) in own)
            param.grad = None


def make_turns(
    job: JobSpec, entrypoints: EntryPoints, passes: Passes, policy: StepPolicy, named: NamedParams
) -> list[StepTurn]:
    """Makes the turns of a job's steps. policy: of a whole step; an average is taken after the last
    turn."""
    if job.turns is None:
        return [StepTurn(named, passes, policy)]
    assert isinstance(policy.optimizer, OptimizersInOrder)
    objectives, turns = step_functions(job, entrypoints), []
    parts = zip(by_turn(job.turns, named), objectives, policy.optimizer.parts, strict=True)
    for number, ((spec, own), objective, optimizer) in enumerate(parts):
        own_policy = replace(
            policy,
            job=job.altered(optimizer=spec.optimizer),
            params=[param for _, param in own],
            optimizer=optimizer,
            rates=ReportedRates(spec.optimizer, spec.name),
            average=policy.average if number + 1 == len(job.turns) else None,
        )
        own_passes = replace(passes, objective=objective)
        turns.append(StepTurn(own, own_passes, own_policy, spec.name, number))
    return turns


def unfreeze(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Ends the turns of a step: all of these parameters are trained again."""
    for _, param in params:
        param.requires_grad_(True)


def logged_of(turn: StepTurn, loss: float, num_rows: float, logged: LoggedSums) -> LoggedSums:
    """Returns what a turn has logged by the names that it has in the step, with the turn's loss."""
    own = {f"{name}.{turn.name}": sums for name, sums in logged.items()}
    return {f"loss.{turn.name}": (loss * num_rows, num_rows), **own}


def whole_step(turns: Sequence[StepTurn], reports: Sequence[StepReport]) -> StepReport:
    """Returns the report of a step of these turns: its loss is the sum of theirs."""
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
