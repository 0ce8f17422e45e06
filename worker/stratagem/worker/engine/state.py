"""The saved state of a trainer consists of parameters, buffers, optimizer, and additions of its
settings.

Nothing else that a step uses outlives the step. The module does not know how a step is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stratagem.worker.engine import state_format
from stratagem.worker.engine.callbacks import NO_ANSWER, Callbacks, StepAnswer
from stratagem.worker.engine.optimizers import WeightAverage
from stratagem.worker.engine.reports import SegmentSummary, StepReport, Tally
from stratagem.worker.engine.shadow_schedule import ShadowSchedule
from stratagem.worker.engine.slices import OptimizerPieces
from stratagem.worker.engine.state_format import NOTHING
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.models.tensors import ModelForm
from stratagem.worker.numerics.precision import LossScale
from stratagem.worker.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.phases import PhaseTraining

# ---- State of a trainer ----

State = tuple[dict[str, Tensor], dict[str, str]]
"""(tensors by name, metadata)."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The parts of a trainer that have a state. Used by one thread."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: Sequence[tuple[str, nn.Parameter]]
    scale: LossScale
    schedule: ShadowSchedule | None = None
    further: Sequence[PhaseTraining | WeightAverage] = ()
    """Further parts with tensors that all members hold."""
    compressor: Compressor | None = None
    pieces: OptimizerPieces | None = None
    """The pieces of this member, where the optimizer's state is divided among the members."""
    form: ModelForm = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", ModelForm(self.model, self.params))

    def live(self, step: int) -> State:
        """The tensors themselves, after `step` steps. Valid until the next one."""
        tensors, numbers = self.parts()
        return tensors, state_format.state_metadata(step, numbers)

    def parts(self) -> State:
        """`live`, without the number of steps."""
        tensors, numbers = self._optimizer_state()
        numbers |= self.scale.metadata()
        if self.schedule is not None:
            numbers |= self.schedule.metadata()
        for each in self.further:
            more, texts = each.state()
            tensors, numbers = {**tensors, **more}, {**numbers, **texts}
        return {**self._model_state(), **tensors}, numbers

    def _model_state(self) -> dict[str, Tensor]:
        """Return what all members hold of the model."""
        if self.pieces is None:
            return state_format.model_state(self.model)
        return self.pieces.model_state(self.model)

    def _optimizer_state(self) -> State:
        """Return what all members hold of the optimizer."""
        if self.pieces is None:
            return state_format.optimizer_state(self.optimizer, self.params)
        return self.pieces.whole_state() if self.pieces.holds_all else ({}, {})

    def copied_mirror(
        self, step: int, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State | None:
        """`copied` as the member before this one gives it, of the mirror of its slice; None without
        one."""
        if self.pieces is None or not self.pieces.is_mirrored:
            return None
        tensors, metadata = self.live(step)
        own, numbers = self._part(self.pieces, tensors, of_mirror=True)
        return state_format.copied(own, into), {**metadata, **numbers}

    def copied(
        self, step: int, *, with_shared: bool, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State:
        """Copy on the CPU, also of residuals; of a state that is divided, this member's part.
        with_shared: beside residuals also what all members hold. into: see `state_format.copied`.

        Raises UserCodeError if training has changed which tensors there are.
        """
        self.form.check()
        tensors, metadata = self.live(step)
        if self.pieces is not None and not self.pieces.holds_all:
            tensors, numbers = self._part(self.pieces, tensors, of_mirror=False)
            metadata = {**metadata, **numbers}
        if self.compressor is not None:
            tensors = {**(tensors if with_shared else {}), **self.compressor.state()}
        return state_format.copied(tensors, into), metadata

    def _part(
        self, pieces: OptimizerPieces, live: Mapping[str, Tensor], *, of_mirror: bool
    ) -> State:
        """Return the part that this member, or the one before it, copies of a divided state."""
        rest = {n: t for n, t in live.items() if not n.startswith(state_format.MODEL)}
        num_bytes = sum(tensor.nbytes for tensor in rest.values())
        model = pieces.part_of_model(self.model, num_bytes, of_mirror=of_mirror)
        own, numbers = pieces.own_state(of_mirror=of_mirror)
        is_first = (pieces.mirrored_rank if of_mirror else pieces.rank) == 0
        return {**model, **(rest if is_first else {}), **own}, numbers

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
        """Put a state in the place of the present one; return after how many steps it was
        taken."""
        step = state_format.step_of(metadata)
        self.load_parts(tensors, metadata, step)
        return step

    def load_parts(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], step: int
    ) -> None:
        """Take over what `parts` gave after `step` steps."""
        if self.pieces is None:
            state_format.load_model_state(self.model, tensors)
            self.form.note_extra()
            state_format.load_optimizer_state(self.optimizer, self.params, tensors, metadata)
        else:
            self.pieces.load_model(self.model, tensors)
            self.form.note_extra()
            self.pieces.load(tensors, metadata)
        if self.compressor is not None:
            self.compressor.load_state(tensors)
        for each in self.further:
            each.load(tensors, metadata)
        if self.schedule is not None:
            self.schedule.load(metadata, step)
        self.scale.load(metadata)


# ---- Interfaces of a trainer and its exchange ----
#
# A session trains through `MemberTrainer`, which takes its steps together with the other members of
# a party, over an `Exchange`.


class Exchange(Protocol):
    """The connections of one membership, whatever goes over them."""

    @property
    def name(self) -> str:
        """The engines and methods in use, for people."""

    @property
    def shares_memory(self) -> bool:
        """True if it goes through memory that members of a host share."""

    def cut(self) -> None:
        """Make a step that is under way raise, here and soon at the peers; from any thread."""

    def close(self) -> None:
        """Free everything; cut comes first."""


Exchange_contra = TypeVar("Exchange_contra", contravariant=True)


class MemberTrainer(Protocol[Exchange_contra]):
    """Trains what one member has of a model, over an exchange of its kind. Used by one thread."""

    step: int
    """Steps applied."""

    @property
    def model(self) -> nn.Module:
        """The model that this member has, or the one that its models have in common."""

    @property
    def callbacks(self) -> Callbacks:
        """The hooks of the user's."""

    @property
    def is_sole_copy(self) -> bool:
        """True if this member holds state that no other has."""

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Say that steps up to `to_step` come next, of which this member computes these shards."""

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to those after as many reductions of a plateau, from the next
        step on."""

    def train_step(
        self,
        exchange: Exchange_contra,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Make one step over the next global batch, of whose `num_shards` shards this member owns
        some. stop: this member wishes that all stop after it, where members take steps together.
        answer: what on_step has said to this member of the step before; where that wants the end,
        all end the training before this step."""

    def end_segment(self, exchange: Exchange_contra, tally: Tally) -> SegmentSummary:
        """End a segment with these sums over its steps; its state may then be copied."""

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the present state, to be used before the next step."""

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Return the sums of the share's batches that this member has."""

    def copy_state(self, *, is_first: bool = True, into: Mapping[str, Tensor] = NOTHING) -> State:
        """Return the state of this member, copied to the CPU; what all members have is left to the
        first of them where each has something alone. into: tensors of an earlier copy, which nobody
        needs any more."""

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Continue from a state of the whole party, or from at least this member's part of it."""

    def fingerprint(self) -> str:
        """Return a fingerprint of the state that this member holds."""


class Joined(NamedTuple):
    """A trainer, and the exchange of its kind that it takes steps over under one membership."""

    trainer: MemberTrainer[Any]
    exchange: Exchange
