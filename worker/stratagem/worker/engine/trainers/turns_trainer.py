"""The synchronous training step of a job with turns: several optimizers of one model.

Each turn is a whole synchronous step over its own parameters: forward, backward, exchange, update.
The turns of a step are one transaction: where one of them fails, those before it are undone, so
that the whole step is done again, perhaps with other members.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from stratagem.common.numerics.batch_shards import split_rows
from stratagem.common.numerics.mixed_keys import Key
from stratagem.worker.data.datasets import Coming
from stratagem.worker.engine.objectives.make_objective import step_functions
from stratagem.worker.engine.optim.optimizers import OptimizersInOrder
from stratagem.worker.engine.optim.reported_rates import ReportedRates
from stratagem.worker.engine.optim.turn_parameters import by_turn
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.step.apply_step import StepPolicy
from stratagem.worker.engine.step.forward_backward import Passes, micro_batches, part
from stratagem.worker.engine.step.logged_sums import LoggedSums
from stratagem.worker.engine.step.step_answer import NO_ANSWER, StepAnswer
from stratagem.worker.engine.step.step_report import StepReport
from stratagem.worker.engine.trainers.synchronous_trainer import Trainer
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.trainer_state import State
from stratagem.worker.exchange.reducer import Reducer


@dataclass(frozen=True, slots=True)
class _Turn:
    name: str
    params: list[tuple[str, nn.Parameter]]
    passes: Passes
    policy: StepPolicy


class TurnsTrainer(Trainer):
    """Model, optimizers and data position of one session. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        job = setup.job
        assert job.turns is not None
        assert isinstance(self.optimizer, OptimizersInOrder)
        self._number = 0  # of the present turn
        self._turns: list[_Turn] = []
        objectives = step_functions(job, setup.entrypoints)
        parts = zip(by_turn(job.turns, self.params), objectives, self.optimizer.parts, strict=True)
        for (spec, own), objective, optimizer in parts:
            is_last = len(self._turns) + 1 == len(job.turns)
            policy = replace(
                self._policy,
                job=job.model_copy(update={"optimizer": spec.optimizer}),
                params=[param for _, param in own],
                optimizer=optimizer,
                rates=ReportedRates(spec.optimizer, spec.name),
                average=self._policy.average if is_last else None,
            )
            passes = replace(self._passes, objective=objective)
            self._turns.append(_Turn(spec.name, own, passes, policy))
        self._last = {name for name, _ in self._turns[-1].params}

    def train_step(
        self,
        exchange: Reducer,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Makes one step of each turn over the next global batch; all of them, or none."""
        step, staged = self.step, self._staged()
        reports: list[StepReport] = []
        try:
            for number, turn in enumerate(self._turns):
                self.step, self._number = step, number
                self._begin(turn)
                report = super().train_step(exchange, owned, num_shards, stop=stop, answer=answer)
                reports.append(report)
        except BaseException:
            self._restore(*staged)
            raise
        finally:
            for _, param in self.params:
                param.requires_grad_(True)
        return self._whole(reports)

    def lower_rates(self, num_reductions: int) -> None:
        """Does nothing: turns follow no metric."""

    def _begin(self, turn: _Turn) -> None:
        """Has the next step be one of this turn: what it does not train is frozen."""
        own = {name for name, _ in turn.params}
        for name, param in self.params:
            param.requires_grad_(name in own)
            param.grad = None
        self._passes, self._policy = turn.passes, turn.policy

    def _whole(self, reports: list[StepReport]) -> StepReport:
        num_skipped = sum(report.num_skipped for report in reports)
        rows = float(reports[0].num_rows)
        logged: LoggedSums = {}
        for turn, report in zip(self._turns, reports, strict=True):
            if not report.num_skipped:
                logged = {**logged, f"loss.{turn.name}": (report.loss * rows, rows)}
                own = {f"{name}.{turn.name}": sums for name, sums in report.logged.items()}
                logged = {**logged, **own}
        return replace(
            reports[-1],
            loss=sum(report.loss for report in reports),
            weight=0.0 if num_skipped else rows,
            grad_norm=max(report.grad_norm for report in reports),
            num_skipped=num_skipped,
            learning_rates={k: v for report in reports for k, v in report.learning_rates.items()},
            logged=logged,
            micro_batch_losses=(),
            exchange_wait_s=sum(report.exchange_wait_s for report in reports),
        )

    @property
    def _exchange_number(self) -> int:
        return self.step * len(self._turns) + self._number + 1

    def _key(self, step: int, shard: int, micro_batch: int) -> Key:
        return (self.job.seed, step, self._number, shard, micro_batch)

    def _key_of_turn(self, step: int, turn: int, shard: int, micro_batch: int) -> Key:
        return (self.job.seed, step, turn, shard, micro_batch)

    def _coming(self, owned: range, num_shards: int, to_step: int) -> Iterator[Coming]:
        for step in range(self.step, to_step):
            epoch, indices = self._order.batch(step)
            live = split_rows(indices.shape[0], min(num_shards, indices.shape[0]))
            for turn in range(len(self._turns)):
                for shard in range(owned.start, min(owned.stop, len(live))):
                    rows = self._rows(step, epoch, part(indices, live[shard]))
                    cuts = self._window.cut(rows.indices.shape[0])
                    key = partial(self._key_of_turn, step, turn, shard)
                    yield from micro_batches(rows, cuts, key)

    # ---- the transaction ----

    def _staged(self) -> State:
        """Copies what the turns before the last one will change. The last one changes nothing
        before all of its sums are here."""
        tensors, metadata = self.state()
        kept = {name: t.clone() for name, t in tensors.items() if not self._is_last(name)}
        return kept, metadata

    def _restore(self, kept: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        live = self.state()[0]
        own = {name: tensor for name, tensor in live.items() if self._is_last(name)}
        self.load_state({**own, **kept}, metadata)

    def _is_last(self, name: str) -> bool:
        if name.startswith(state_format.OPTIMIZER):
            name = name.removeprefix(state_format.OPTIMIZER).rpartition("/")[0]
        return name.removeprefix(state_format.MODEL) in self._last
