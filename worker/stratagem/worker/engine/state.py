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
"""A state: (tensors by name, metadata)."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Collects and loads the state of a trainer's parts. Used by one thread."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: Sequence[tuple[str, nn.Parameter]]
    scale: LossScale
    schedule: ShadowSchedule | None = None
    further: Sequence[PhaseTraining | WeightAverage] = ()
    """Further parts whose tensors all members hold."""
    compressor: Compressor | None = None
    pieces: OptimizerPieces | None = None
    """This member's pieces, if the optimizer's state is divided among the members; else None."""
    form: ModelForm = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", ModelForm(self.model, self.params))

    def live(self, step: int) -> State:
        """Return the live tensors and metadata after `step` steps, valid until the next step."""
        tensors, numbers = self.parts()
        return tensors, state_format.state_metadata(step, numbers)

    def parts(self) -> State:
        """Return the same (live tensors, metadata) as `live`, without the number of steps."""
        tensors, numbers = self._optimizer_state()
        numbers |= self.scale.metadata()
        if self.schedule is not None:
            numbers |= self.schedule.metadata()
        for part in self.further:
            more, texts = part.state()
            tensors, numbers = {**tensors, **more}, {**numbers, **texts}
        return {**self._model_state(), **tensors}, numbers

    def _model_state(self) -> dict[str, Tensor]:
        """Return the model's tensors that all members hold."""
        if self.pieces is None:
            return state_format.model_state(self.model)
        return self.pieces.model_state(self.model)

    def _optimizer_state(self) -> State:
        """Return the optimizer's tensors and metadata that all members hold."""
        if self.pieces is None:
            return state_format.optimizer_state(self.optimizer, self.params)
        return self.pieces.whole_state() if self.pieces.holds_all else ({}, {})

    def copied_mirror(
        self, step: int, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State | None:
        """Return the result of `copied` of the previous member, made from the mirror of its slice;
        None without a mirror."""
        if self.pieces is None or not self.pieces.is_mirrored:
            return None
        tensors, metadata = self.live(step)
        slice_tensors, numbers = self._part(self.pieces, tensors, of_mirror=True)
        return state_format.copied(slice_tensors, into), {**metadata, **numbers}

    def copied(
        self, step: int, *, with_shared: bool, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State:
        """Copy the state to the CPU, with residuals; of a divided state, this member's part.

        with_shared: also the state that all members hold. into: tensors that may be overwritten.
        Raises UserCodeError if training has changed the model's set of tensors.
        """
        self.form.check()
        tensors, metadata = self.live(step)
        if self.pieces is not None and not self.pieces.holds_all:
            tensors, numbers = self._part(self.pieces, tensors, of_mirror=False)
            metadata = {**metadata, **numbers}
        if self.compressor is not None:
            tensors = {**(tensors if with_shared else {}), **self.compressor.state()}
            if self.compressor.keeps_state:  # those of several members are joined in this order
                tensors = dict(sorted(tensors.items()))
        return state_format.copied(tensors, into), metadata

    def _part(
        self, pieces: OptimizerPieces, live: Mapping[str, Tensor], *, of_mirror: bool
    ) -> State:
        """Return this member's part of a divided state; of_mirror: the previous member's."""
        rest = {n: t for n, t in live.items() if not n.startswith(state_format.MODEL)}
        num_bytes = sum(tensor.nbytes for tensor in rest.values())
        model = pieces.part_of_model(self.model, num_bytes, of_mirror=of_mirror)
        slice_tensors, numbers = pieces.own_state(of_mirror=of_mirror)
        is_first = (pieces.mirrored_rank if of_mirror else pieces.rank) == 0
        return {**model, **(rest if is_first else {}), **slice_tensors}, numbers

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
        """Load a state; return the number of steps after which it was taken."""
        step = state_format.step_of(metadata)
        self.load_parts(tensors, metadata, step)
        return step

    def load_parts(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], step: int
    ) -> None:
        """Load the result of `parts` after `step` steps."""
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
        for part in self.further:
            part.load(tensors, metadata)
        if self.schedule is not None:
            self.schedule.load(metadata, step)
        self.scale.load(metadata)


# ---- Interfaces of a trainer and its exchange ----
#
# A session trains through `MemberTrainer`, which takes its steps together with the other members of
# a party, over an `Exchange`.


class Exchange(Protocol):
    """The connections among the members of one membership, for any kind of exchange."""

    @property
    def name(self) -> str:
        """Names of the engines and methods in use, for display."""

    @property
    def shares_memory(self) -> bool:
        """True if the exchange goes through memory shared by the members of a host."""

    def cut(self) -> None:
        """Make a running step raise, here and soon at the peers. May be called from any thread."""

    def close(self) -> None:
        """Free all connections; call `cut` first."""


Exchange_contra = TypeVar("Exchange_contra", contravariant=True)


class MemberTrainer(Protocol[Exchange_contra]):
    """Interface of trainers: each trains its member's part. Used by one thread."""

    step: int
    """Number of steps applied."""

    @property
    def model(self) -> nn.Module:
        """The member's model, or the common model of its nodes or replicas."""

    @property
    def callbacks(self) -> Callbacks:
        """The user's callbacks, which this trainer's steps and evaluations call."""

    @property
    def is_sole_copy(self) -> bool:
        """True if this member holds state that no other member has."""

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Announce the steps up to `to_step`, whose `owned` shards may be read ahead."""

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""

    def train_step(
        self,
        exchange: Exchange_contra,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Make one step over the next global batch of `num_shards` shards, of which this member
        computes `owned`.

        stop: request that all members stop after this step. answer: the answer of on_step for the
        previous step; if it wants the end, all members end the training before this step.
        """

    def end_segment(self, exchange: Exchange_contra, tally: Tally) -> SegmentSummary:
        """End a segment; return its summary. tally: sums over its steps."""

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the present state, to be used before the next step."""

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate this member's share of the batches; return the sums."""

    def copy_state(self, *, is_first: bool = True, into: Mapping[str, Tensor] = NOTHING) -> State:
        """Return this member's state, copied to the CPU. Where members hold different states, only
        the first one includes what all of them have. into: tensors of an earlier copy that may be
        overwritten."""

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load a state of the whole party, or at least this member's part of one."""

    def fingerprint(self) -> str:
        """Return a fingerprint of this member's state."""


class Joined(NamedTuple):
    """A trainer, and the exchange over which it makes steps under one membership."""

    trainer: MemberTrainer[Any]
    exchange: Exchange
