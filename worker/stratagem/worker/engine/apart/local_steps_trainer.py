"""Training of the replicas that one member owns, which take local steps (local SGD, DiLoCo).

Every replica has parameters, buffers and an optimizer of its own. A step is a step of each on its
shard of the global batch; after every `local_steps` of them, and after the last one, outer steps
join all replicas into what is committed and evaluated. Knows no gRPC, no members and no
coordinator.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

from torch import Tensor, nn

from stratagem.common.strategy import DataParallel
from stratagem.worker.engine.apart.local_model import in_training, own_part, prefix_of
from stratagem.worker.engine.apart.local_models import LocalModels
from stratagem.worker.engine.apart.outer_fragment import OuterFragment
from stratagem.worker.engine.apart.outer_steps import OuterSteps
from stratagem.worker.engine.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.logged_sums import means
from stratagem.worker.engine.step.model_buffers import constant_buffers
from stratagem.worker.engine.step.step_answer import NO_ANSWER, StepAnswer
from stratagem.worker.engine.step.step_report import (
    PartReport,
    SegmentSummary,
    StepReport,
    Tally,
    mean_loss,
)
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.engine.trainers.trainer_state import State
from stratagem.worker.exchange.fragments import FragmentExchange

REPLICA: Final = "replica"
"""What a model is called here."""


class LocalStepsTrainer:
    """The replicas of one member. Used by one thread."""

    is_sole_copy: Final = True
    """No other member has these replicas."""

    def __init__(self, setup: Setup, models: Mapping[int, nn.Module]) -> None:
        """setup.model becomes what the replicas have in common; models: by number."""
        strategy = setup.job.strategy
        assert isinstance(strategy, DataParallel)
        self._setup, self.model = setup, setup.model
        self._keeps_models = not strategy.options.are_replicas_alike
        self._models = LocalModels(setup, models, REPLICA)
        self._replicas, self.num_steps = self._models.by_number, self._models.num_steps
        self._outer = OuterSteps(setup, self._replicas, self.num_steps)
        self.step = 0

    @property
    def callbacks(self) -> Callbacks:
        """The hooks of the user's."""
        return self._setup.callbacks

    @property
    def notes(self) -> list[str]:
        """Sentences about settings that are carried out in another way than they say."""
        return self._setup.notes

    @property
    def fragments(self) -> Sequence[OuterFragment]:
        """The parts in which replicas are joined."""
        return self._outer.fragments

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Has the micro-batches of the replicas' coming steps read ahead."""
        self._models.expect(num_shards, self.step, to_step)

    def lower_rates(self, num_reductions: int) -> None:
        """Sets the rates to those after as many reductions of a plateau, from the next step on."""
        self._models.lower_rates(num_reductions)

    def train_step(
        self,
        exchange: FragmentExchange,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """A step of each own replica, and where it is due the outer step of all. A replica is a
        shard; replicas have no step in common after which they could stop.

        The loss is of the own replicas; what is measured where they are joined is of all. After an
        error the replicas are at different steps, and the trainer is of no more use.
        """
        taken = self._models.take_step(self.step, owned, num_shards)
        own, step = taken.sums, self.step + 1
        joined = self._outer.after(exchange, step)
        self.step = step
        return StepReport(
            step=step,
            loss=own.loss / own.weight if own.weight else math.nan,
            weight=own.weight,
            num_rows=taken.num_rows,
            stop=False,
            grad_norm=own.grad_norm,
            num_skipped=own.num_skipped,
            logged=own.logged,
            learning_rates=taken.learning_rates,
            exchange_wait_s=0.0 if joined is None else joined.wait_s,
            parts=_with_drifts(taken.parts, {} if joined is None else joined.drifts),
            measured={} if joined is None else in_training(joined.numbers),
        )

    def end_segment(self, exchange: FragmentExchange, tally: Tally) -> SegmentSummary:
        """Returns the summary over all replicas, once all that was cut has come from them. The sums
        are kept here, not taken from the tally."""
        self._models.check_form()
        sums = self._outer.end_segment(self.step)
        skipped = {"skipped_steps": float(sums.num_skipped)}
        return SegmentSummary(
            loss=mean_loss(sums.loss, sums.weight, sums.num_skipped),
            metrics={
                "max_grad_norm": sums.max_grad_norm,
                "outer_grad_norm": self._outer.outer_grad_norm,
                **(skipped if self._models.rows.window.may_skip else {}),
                **means(sums.logged),
            },
            traffic=self._traffic(),
        )

    def _traffic(self) -> dict[str, int]:
        coders = [each.compressor for each in self.fragments if each.compressor is not None]
        taken = [asdict(coder.take_traffic()) for coder in coders]
        return {name: sum(each[name] for each in taken) for name in taken[0]} if taken else {}

    def evaluator(self) -> Evaluator:
        """Returns the evaluator of what the replicas have in common."""
        self.model.eval()
        return self._setup.evaluator

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Returns the sums of the share's batches."""
        with constant_buffers(self.model):
            return self.evaluator().parts_of(share)

    def copy_common_state(self, into: Mapping[str, Tensor] = state_format.NOTHING) -> State:
        """Copies on the CPU, in order of name, what all members have alike. into: see
        `state_format.copied`."""
        tensors, metadata = self._common_state()
        return state_format.copied(dict(sorted(tensors.items())), into), metadata

    def copy_state(
        self, *, is_first: bool = True, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State:
        """Copies `live_state` on the CPU, in order of name. into: see `state_format.copied`."""
        tensors, metadata = self.live_state(is_first=is_first)
        return state_format.copied(dict(sorted(tensors.items())), into), metadata

    def live_state(self, *, is_first: bool = True) -> State:
        """Returns the tensors themselves, valid until the next step: `replica<i>/…` of the own
        replicas, without a model that is the common one; and what all have in common, of the first
        member."""
        tensors, metadata = self._common_state() if is_first else ({}, {})
        metadata |= state_format.state_metadata(self.step)
        for number, replica in self._replicas.items():
            own, numbers = replica.saved.parts()
            prefix = prefix_of(REPLICA, number)
            tensors |= {
                f"{prefix}{name}": tensor
                for name, tensor in own.items()
                if self._keeps_models or not name.startswith(state_format.MODEL)
            }
            metadata |= {f"{prefix}{name}": value for name, value in numbers.items()}
        return tensors, metadata

    def _common_state(self) -> State:
        tensors = {**state_format.model_state(self.model), **self._outer.state()}
        return tensors, state_format.state_metadata(self.step)

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Continues from a state of the end of a segment; from one without replicas each
        begins with what is there of an optimizer."""
        step = state_format.step_of(metadata)
        state_format.load_model_state(self.model, tensors)
        for number, replica in self._replicas.items():
            own = own_part(REPLICA, number, tensors)
            numbers = own_part(REPLICA, number, metadata)
            replica.saved.load_parts({**tensors, **own}, {**metadata, **numbers}, step)
        self._outer.load(tensors, step)
        self.step = step

    def fingerprint(self) -> str:
        """Returns the fingerprint of what all members hold alike."""
        return state_format.fingerprint(*self._common_state())


def _with_drifts(parts: Sequence[PartReport], drifts: Mapping[int, float]) -> list[PartReport]:
    """Return what there is to say of each replica, with how far it has moved: also of one that had
    no rows in this step."""
    found = {part.party: part for part in parts}
    for number, drift in drifts.items():
        part = found.get(f"{REPLICA}/{number}", PartReport(f"{REPLICA}/{number}"))
        found[part.party] = replace(part, exact={**part.exact, **in_training({"drift": drift})})
    return list(found.values())
