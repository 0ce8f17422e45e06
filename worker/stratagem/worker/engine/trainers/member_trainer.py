"""The interfaces of what a session trains: a trainer whose steps are taken together with the other
members of a party, and the exchange that they are taken over."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from stratagem.worker.engine.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.state_format import NOTHING
from stratagem.worker.engine.step.step_answer import NO_ANSWER, StepAnswer
from stratagem.worker.engine.step.step_report import SegmentSummary, StepReport, Tally
from stratagem.worker.engine.trainers.trainer_state import State


class Exchange(Protocol):
    """The connections of one membership, whatever goes over them."""

    @property
    def name(self) -> str:
        """The engines and methods in use, for people."""

    @property
    def shares_memory(self) -> bool:
        """True if it goes through memory that members of a host share."""

    def cut(self) -> None:
        """Makes a step that is under way raise, here and soon at the peers; from any thread."""

    def close(self) -> None:
        """Frees everything; cut comes first."""


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
        """Says that steps up to `to_step` come next, of which this member computes these shards."""

    def lower_rates(self, num_reductions: int) -> None:
        """Sets the learning rates to those after as many reductions of a plateau, from the next
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
        """Makes one step over the next global batch, of whose `num_shards` shards this member owns
        some. stop: this member wishes that all stop after it, where members take steps together.
        answer: what on_step has said to this member of the step before; where that wants the end,
        all end the training before this step."""

    def end_segment(self, exchange: Exchange_contra, tally: Tally) -> SegmentSummary:
        """Ends a segment with these sums over its steps; its state may then be copied."""

    def evaluator(self) -> Evaluator:
        """Returns the evaluator of the present state, to be used before the next step."""

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Returns the sums of the share's batches that this member has."""

    def copy_state(self, *, is_first: bool = True, into: Mapping[str, Tensor] = NOTHING) -> State:
        """Returns the state of this member, copied to the CPU; what all members have is left to the
        first of them where each has something alone. into: tensors of an earlier copy, which nobody
        needs any more."""

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Continues from a state of the whole party, or from at least this member's part of it."""

    def fingerprint(self) -> str:
        """Returns a fingerprint of the state that this member holds."""


class Joined(NamedTuple):
    """A trainer, and the exchange of its kind that it takes steps over under one membership."""

    trainer: MemberTrainer[Any]
    exchange: Exchange
