"""Train the replicas that one member owns by local steps (local SGD, DiLoCo).

Every replica has parameters, buffers and an optimizer of its own. A step is a step of each replica
on its shard of the global batch. After every `local_steps` of them, and after the last one, outer
steps join all replicas into the state that is committed and evaluated. The module knows neither
gRPC nor members nor the coordinator.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import DataParallel, MeanOfReplicas, OuterOptimizer
from stratagem.common.strategy.local_steps import Due, due_after, fragments_of
from stratagem.worker.engine import state_format
from stratagem.worker.engine.apply_step import are_finite
from stratagem.worker.engine.buffers import Buffers, constant_buffers
from stratagem.worker.engine.callbacks import NO_ANSWER, StepAnswer
from stratagem.worker.engine.forward_backward import (
    NUM_EXTRAS,
    LoggedSums,
    added,
    means,
    packed,
    unpacked,
)
from stratagem.worker.engine.local_models import (
    LocalModel,
    LocalModels,
    LocalSums,
    in_training,
    own_part,
    prefix_of,
)
from stratagem.worker.engine.optimizers import update
from stratagem.worker.engine.reports import PartReport, SegmentSummary, StepReport, Tally, mean_loss
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.state import State
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.compressor import compressor_of
from stratagem.worker.exchange.layout import BUCKET_BYTES, CODED_BUCKET_BYTES, parts_of, total_norm
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.sliced_reducer import FragmentExchange
from stratagem.worker.exchange.transports import StepScalars, num_scalars
from stratagem.worker.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator
from stratagem.worker.user_code.entrypoints import user_code

# ---- Schedule of outer steps ----
#
# `OuterSteps` decides which fragment is cut or applied after which local step. Two things travel
# with the last fragment besides its parameters: changes of the model's buffers, which are averaged
# as they are over shards, and sums over the local steps since the previous cut.

_NUM_NUMBERS = 3
"""Number of values summed with each fragment: weight, sum of the loss, skipped steps."""


class JoinReport(NamedTuple):
    """The numbers that all members know after a step in which replicas were joined."""

    numbers: dict[str, float]
    wait_s: float
    drifts: dict[int, float]
    """Distance of each replica held here from the common parameters, over the fragments cut in this
    step; empty if none was."""


@dataclass(slots=True)
class JoinedSums:
    """Sums over all replicas since a segment began; alike on all members."""

    weight: float = 0.0
    loss: float = 0.0
    num_skipped: int = 0
    max_grad_norm: float = 0.0
    logged: LoggedSums = field(default_factory=dict)


class OuterSteps:
    """Runs outer steps, which join this member's replicas with others. Used by one thread."""

    def __init__(self, setup: Setup, replicas: Mapping[int, LocalModel], num_steps: int) -> None:
        """setup.model: holds the common parameters. replicas: this member's, keyed by number.
        num_steps: number of steps of the whole job."""
        strategy, device = setup.job.strategy, setup.gather.device
        assert isinstance(strategy, DataParallel)
        self._replicas, self._options, self._num_steps = replicas, strategy.options, num_steps
        self._num_replicas = strategy.num_replicas
        self._buffers = Buffers(setup.model, device)
        self._own_buffers = {n: Buffers(replica.model, device) for n, replica in replicas.items()}
        self._num_logged = NUM_EXTRAS if setup.objective.may_log else 0
        sizes = [param.numel() for param in setup.model.parameters() if param.requires_grad]
        count = strategy.options.fragments
        if count > len(sizes):
            text = f"{count} is more than the {len(sizes)} parameters that are trained"
            raise InvalidInputError.at("strategy.options.fragments", text)
        num_rest = self._buffers.num_elements + _NUM_NUMBERS + self._num_replicas + self._num_logged
        self.fragments = [
            OuterFragment(setup, replicas, places, num_rest if index == count - 1 else 0)
            for index, places in enumerate(fragments_of(sizes, count))
        ]
        self._sums = JoinedSums()

    def after(self, exchange: FragmentExchange, step: int) -> JoinReport | None:
        """Do what is due after local step `step`: cut fragments (start to sum their replicas'
        moves), or apply the sums of earlier cuts; return None if nothing is due. After an error the
        replicas must not be used."""
        numbers: dict[str, float] = {}
        wait_s, drifts = 0.0, dict[int, float]()
        dues = due_after(step, self._options, self._num_steps)
        for due in dues:
            fragment = self.fragments[due.fragment]
            if due.is_cut:
                failpoint("worker.outer_step.before_exchange")
                fragment.cut(exchange.reducers[due.fragment], step, self._rests(due))
                for number, drift in fragment.drifts.items():
                    drifts[number] = math.hypot(drifts.get(number, 0.0), drift)
                continue
            if not fragment.is_in_flight:  # it was cut before this state began
                continue
            wait_s += self._arrive(due.fragment, step)
            numbers |= self._apply(due.fragment)
            failpoint("worker.outer_step.applied")
        return JoinReport(numbers, wait_s, drifts) if dues else None

    def _rests(self, due: Due) -> dict[int, Tensor]:
        if due.fragment < len(self.fragments) - 1:
            return dict.fromkeys(self._replicas, torch.zeros(0, dtype=torch.float64))
        return {number: self._rest(number, replica) for number, replica in self._replicas.items()}

    def _rest(self, number: int, replica: LocalModel) -> Tensor:
        sums, replica.sums = replica.sums, LocalSums()
        changes = self._own_buffers[number].contribution(number, self._num_replicas)
        numbers = torch.zeros(_NUM_NUMBERS + self._num_replicas, dtype=torch.float64)
        numbers[:_NUM_NUMBERS] = torch.tensor(
            [sums.weight, sums.loss, sums.num_skipped], dtype=torch.float64
        )
        numbers[_NUM_NUMBERS + number] = sums.grad_norm
        return torch.cat([changes, numbers, *([packed(sums.logged)] if self._num_logged else [])])

    def _arrive(self, index: int, step: int) -> float:
        """Wait for a fragment's sums; count the numbers that came with them, once; return the
        seconds waited."""
        fragment = self.fragments[index]
        is_new = fragment.sums is None
        wait_s = fragment.arrive(step)
        if is_new and index == len(self.fragments) - 1 and fragment.sums is not None:
            self._add(fragment.sums)
        return wait_s

    def _apply(self, index: int) -> dict[str, float]:
        """Apply a fragment's sums to the common parameters; return the outer step's metrics."""
        fragment = self.fragments[index]
        sums = fragment.sums
        assert sums is not None
        fragment.apply()
        numbers = {"outer_grad_norm": fragment.norm}
        if index < len(self.fragments) - 1:
            return numbers
        self._buffers.apply(sums.rest, self._num_replicas)
        self._buffers.snapshot()
        for buffers in self._own_buffers.values():
            buffers.take_over(self._buffers)
        weight, loss = sums.rest[self._buffers.num_elements :][:2].tolist()
        return {**numbers, **({"loss": loss / weight} if weight else {})}

    def _add(self, sums: StepScalars) -> None:
        so_far, first = self._sums, self._buffers.num_elements
        last = first + _NUM_NUMBERS + self._num_replicas
        weight, loss, num_skipped, *norms = sums.rest[first:last].tolist()
        so_far.weight += weight
        so_far.loss += loss
        so_far.num_skipped += round(num_skipped)
        so_far.max_grad_norm = max(so_far.max_grad_norm, *norms)
        if self._num_logged:
            so_far.logged = added(so_far.logged, unpacked(sums.rest[last:], None))

    def end_segment(self, step: int) -> JoinedSums:
        """Wait for sums in transfer, to be applied later; return the sums since the last call."""
        for index in range(len(self.fragments)):
            self._arrive(index, step)
        sums, self._sums = self._sums, JoinedSums()
        return sums

    @property
    def outer_grad_norm(self) -> float:
        """2-norm of the latest outer gradient over all fragments."""
        return math.sqrt(math.fsum(fragment.norm**2 for fragment in self.fragments))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of all fragments at the end of a segment."""
        return {name: value for part in self.fragments for name, value in part.state().items()}

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Load the result of `state`; the models must be loaded first."""
        for fragment in self.fragments:
            fragment.load(tensors, step)
        for buffers in (self._buffers, *self._own_buffers.values()):
            buffers.snapshot()
        self._sums = JoinedSums()


# ---- One fragment of the outer step ----
#
# With g the mean over the replicas of (common parameters - own parameters), added in the fixed tree
# and divided once, an outer step computes
#
#     buf    <- momentum * buf + g
#     common <- common - lr * (g + momentum * buf)
#
# and each replica continues from mix * own + (1 - mix) * common. Replicas may take steps between
# the cut, which determines g, and its application.

OUTER: Final = "outer/"
"""Prefix of the names of the outer optimizer's tensors in a state."""
IN_FLIGHT: Final = "inflight/"
"""Prefix of the names of sums in a state that have arrived but are not applied yet."""
_SCALARS: Final = f"{IN_FLIGHT}scalars"
_MOMENTUM: Final = "momentum_buffer"


class OuterFragment:
    """A part of the parameters, with its own outer optimizer and exchange. Used by one thread."""

    def __init__(
        self, setup: Setup, replicas: Mapping[int, LocalModel], places: range, num_rest: int
    ) -> None:
        """setup.model: has the common parameters. replicas: by number. places: the fragment's
        indices among the trained parameters. num_rest: count of further numbers that travel with
        it."""
        strategy = setup.job.strategy
        assert isinstance(strategy, DataParallel)
        self._setup, self._replicas, self._places = setup, replicas, places
        self._num_replicas, self._mix = strategy.num_replicas, strategy.options.mixed_share
        trained = [(n, p) for n, p in setup.model.named_parameters() if p.requires_grad]
        self._named = trained[places.start : places.stop]
        self._params = [param for _, param in self._named]
        self._optimizer = _optimizer(strategy.options.outer_optimizer, self._params)
        num_extras = num_scalars(len(self._named), num_rest)
        self.compressor = compressor_of(
            setup.job, self._named, num_extras, absorbs=False, numerics=setup.numerics
        )
        bucket_bytes = BUCKET_BYTES if self.compressor is None else CODED_BUCKET_BYTES
        self.buckets = GradientBuckets(
            self._named, num_extras=num_extras, bucket_bytes=bucket_bytes
        )
        self._under_way: GradientReducer | None = None
        self.sums: StepScalars | None = None
        """The sums over all replicas; None except between their arrival and the update."""
        self.norm = 0.0
        """2-norm of the latest outer gradient."""
        self.drifts: dict[int, float] = {}
        """2-norm of the distance that each replica held here had moved at the latest cut."""

    @property
    def is_in_flight(self) -> bool:
        """True from the cut, which starts the sums, to the update that applies them."""
        return self._under_way is not None or self.sums is not None

    def cut(self, exchange: GradientReducer, step: int, rest: Mapping[int, Tensor]) -> None:
        """Start to sum over all replicas how far they have moved up to this step. rest: further
        numbers of each replica, to be summed too."""
        count = self._num_replicas
        exchange.begin_step(step, exchange.party.owned, count, divisor=float(count))
        for number, replica in self._replicas.items():
            exchange.begin_shard(number)
            if self.compressor is not None:
                self.compressor.weigh(number, 1.0)
            parts: list[Tensor] = []
            self.buckets.fill(self._moved(replica, parts))
            self.drifts[number] = total_norm(parts, self._setup.numerics).item()
            # Each replica counts alike, whatever rows it has had.
            scalars = StepScalars(1.0, 0.0, 0.0, [1.0] * len(self._params), rest[number])
            exchange.end_shard(number, scalars)
        self._under_way = exchange

    def _params_of(self, replica: LocalModel) -> Sequence[Tensor]:
        return replica.tensors[self._places.start : self._places.stop]

    def _moved(self, replica: LocalModel, parts: list[Tensor]) -> Iterator[Tensor]:
        """Yield (common parameter - replica's parameter) for each parameter, in the type of the
        sum. parts: receives the norms of the blocks of each."""
        layout = self.buckets.layout
        for slot, common, param in zip(
            layout.slots, self._params, self._params_of(replica), strict=True
        ):
            dtype = layout.buckets[slot.bucket].dtype
            moved = common.detach().to(dtype) - param.to(dtype)
            parts += parts_of([moved], self._setup.numerics)
            yield moved

    def arrive(self, step: int) -> float:
        """Wait for the sums, if they are in transfer; return the seconds waited. Raises
        UserCodeError if they are not finite."""
        if self._under_way is None:
            return 0.0
        waits_since_s = time.perf_counter()
        sums = self._under_way.finish()
        wait_s = time.perf_counter() - waits_since_s
        self._under_way = None
        if self.compressor is not None:
            self.compressor.applied()
        self._take(sums, step)
        return wait_s

    def _take(self, sums: StepScalars, step: int) -> None:
        gradients = [param.grad for param in self._params if param.grad is not None]
        norm = total_norm(parts_of(gradients, self._setup.numerics), self._setup.numerics)
        if sums.is_spoiled or not are_finite(norm, gradients):
            text = f"non-finite outer gradient after step {step}: a replica has diverged"
            raise UserCodeError("FloatingPointError", text, activity=f"training step {step}")
        self.sums, self.norm = sums, norm.item()

    @torch.no_grad()
    def apply(self) -> None:
        """Make one outer optimizer step with the arrived sums, and update the replicas. Raises
        UserCodeError."""
        with user_code("the outer step"):  # which refuses a rate that its numbers cannot hold
            update(self._optimizer)
        self.sums = None
        for param in self._params:
            param.grad = None
        for replica in self._replicas.values():
            for replica_param, common in zip(self._params_of(replica), self._params, strict=True):
                if self._mix:
                    replica_param.mul_(self._mix).add_(common, alpha=1.0 - self._mix)
                else:
                    replica_param.copy_(common)

    def state(self) -> dict[str, Tensor]:
        """Return the outer optimizer's tensors (none before its first update) and arrived sums that
        are not applied yet."""
        tensors: dict[str, Tensor] = {}
        for name, param in self._named:
            buffer = self._optimizer.state.get(param, {}).get(_MOMENTUM)
            if buffer is not None:
                tensors[f"{OUTER}{name}/{_MOMENTUM}"] = buffer.detach()
            if self.sums is not None and param.grad is not None:
                tensors[f"{IN_FLIGHT}{name}"] = param.grad
        if self.sums is not None:
            tensors[_SCALARS] = self.sums.flat()
        return tensors

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Load the result of `state`; start over if it has no tensors of this fragment."""
        self._optimizer.state.clear()
        self._under_way = self.sums = None
        for name, param in self._named:
            param.grad = _copied(tensors.get(f"{IN_FLIGHT}{name}"), param)
            buffer = _copied(tensors.get(f"{OUTER}{name}/{_MOMENTUM}"), param)
            if buffer is not None:
                self._optimizer.state[param] = {_MOMENTUM: buffer}
        if all(f"{IN_FLIGHT}{name}" in tensors for name, _ in self._named):
            self._take(StepScalars.of(tensors[_SCALARS].clone(), len(self._named)), step)


def _copied(tensor: Tensor | None, param: nn.Parameter) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_like(param, memory_format=torch.preserve_format).detach().copy_(tensor)


def _optimizer(outer: OuterOptimizer, params: list[nn.Parameter]) -> torch.optim.SGD:
    if isinstance(outer, MeanOfReplicas):
        return torch.optim.SGD(params, lr=1.0, foreach=False)
    momentum = outer.momentum
    return torch.optim.SGD(
        params, lr=outer.lr, momentum=momentum, nesterov=momentum > 0, foreach=False
    )


# ---- Trainer of local steps ----

REPLICA: Final = "replica"
"""The word for one of this trainer's models in the names of series and tensors."""


class LocalStepsTrainer:
    """Trainer of the replicas that one member owns. Used by one thread."""

    is_sole_copy: Final = True
    """True: no other member holds these replicas."""

    def __init__(self, setup: Setup, models: Mapping[int, nn.Module]) -> None:
        """setup.model: becomes the common model of the replicas. models: keyed by number."""
        strategy = setup.job.strategy
        assert isinstance(strategy, DataParallel)
        self.setup, self.model, self.callbacks = setup, setup.model, setup.callbacks
        self._keeps_models = not strategy.options.are_replicas_alike
        self._models = LocalModels(setup, models, REPLICA)
        self._replicas, self.num_steps = self._models.by_number, self._models.num_steps
        self._outer = OuterSteps(setup, self._replicas, self.num_steps)
        self.step = 0

    @property
    def fragments(self) -> Sequence[OuterFragment]:
        """The fragments in which the replicas are joined."""
        return self._outer.fragments

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Announce the coming steps, so that the micro-batches of the replicas are read ahead."""
        self._models.expect(num_shards, self.step, to_step)

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
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
        """Make a step of each replica here, and the outer step of all replicas if it is due.

        A replica is a shard; `stop` is ignored, as replicas have no step in common. The loss is
        that of the replicas held here; numbers measured at a join are those of all replicas. After
        an error the trainer cannot be used any more.
        """
        local_steps, step = self._models.take_step(self.step, owned, num_shards), self.step + 1
        joined = self._outer.after(exchange, step)
        self.step = step
        if joined is None:
            return local_steps.report(step, 0.0)
        return replace(
            local_steps.report(step, joined.wait_s),
            parts=_with_drifts(local_steps.parts, joined.drifts),
            measured=in_training(joined.numbers),
        )

    def end_segment(self, exchange: FragmentExchange, tally: Tally) -> SegmentSummary:
        """Return the summary over all replicas, after waiting for all sums in transfer. It comes
        from the sums of the outer steps, not from the tally."""
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
        coders = [part.compressor for part in self.fragments if part.compressor is not None]
        counts = [asdict(coder.take_traffic()) for coder in coders]
        return {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the common model."""
        self.model.eval()
        return self.setup.evaluator

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate this member's share of the batches on the common model; return the sums."""
        with constant_buffers(self.model):
            return self.evaluator().parts_of(share)

    def copy_common_state(self, into: Mapping[str, Tensor] = state_format.NOTHING) -> State:
        """Copy the state that all members share to the CPU, sorted by name. into: tensors that may
        be overwritten."""
        tensors, metadata = self._common_state()
        return state_format.copied(dict(sorted(tensors.items())), into), metadata

    def copy_state(
        self, *, is_first: bool = True, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State:
        """Copy `live_state` to the CPU, sorted by name. into: tensors that may be overwritten."""
        tensors, metadata = self.live_state(is_first=is_first)
        return state_format.copied(dict(sorted(tensors.items())), into), metadata

    def live_state(self, *, is_first: bool = True) -> State:
        """Return the live tensors, valid until the next step: `replica<i>/…` of each replica held
        here, except models equal to the common one; on the first member also the common state."""
        tensors, metadata = self._common_state() if is_first else ({}, {})
        metadata |= state_format.state_metadata(self.step)
        for number, replica in self._replicas.items():
            replica_tensors, numbers = replica.saved.parts()
            prefix = prefix_of(REPLICA, number)
            tensors |= {
                f"{prefix}{name}": tensor
                for name, tensor in replica_tensors.items()
                if self._keeps_models or not name.startswith(state_format.MODEL)
            }
            metadata |= {f"{prefix}{name}": value for name, value in numbers.items()}
        return tensors, metadata

    def _common_state(self) -> State:
        tensors = {**state_format.model_state(self.model), **self._outer.state()}
        return tensors, state_format.state_metadata(self.step)

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load a state from the end of a segment. A state without replicas initialises each one,
        with the optimizer's tensors that the state has."""
        step = state_format.step_of(metadata)
        state_format.load_model_state(self.model, tensors)
        for number, replica in self._replicas.items():
            replica_tensors = own_part(REPLICA, number, tensors)
            numbers = own_part(REPLICA, number, metadata)
            replica.saved.load_parts({**tensors, **replica_tensors}, {**metadata, **numbers}, step)
        self._outer.load(tensors, step)
        self.step = step

    def fingerprint(self) -> str:
        """Return a fingerprint of the state that all members share."""
        return state_format.fingerprint(*self._common_state())


def _with_drifts(parts: Sequence[PartReport], drifts: Mapping[int, float]) -> list[PartReport]:
    """Return the step-history entries of the replicas, with the distance each has moved; replicas
    without rows in this step get an entry too."""
    part_of = {part.party: part for part in parts}
    for number, drift in drifts.items():
        part = part_of.get(f"{REPLICA}/{number}", PartReport(f"{REPLICA}/{number}"))
        part_of[part.party] = replace(part, exact={**part.exact, **in_training({"drift": drift})})
    return list(part_of.values())
