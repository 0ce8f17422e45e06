"""Train the nodes that one member owns in a decentralized run (D-PSGD), and keep their state.

Every node has parameters, optimizer and buffers of its own. A step is a local step of each node on
its shard of the global batch, and then one round of mixing with its neighbours. Evaluation uses the
mean of all nodes. The module knows neither gRPC nor members nor the coordinator.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import DataParallel
from stratagem.worker.engine import state_format
from stratagem.worker.engine.buffers import constant_buffers
from stratagem.worker.engine.callbacks import NO_ANSWER, StepAnswer
from stratagem.worker.engine.forward_backward import NUM_EXTRAS, LoggedSums, means, packed, unpacked
from stratagem.worker.engine.local_models import (
    LocalModels,
    LocalSums,
    in_training,
    own_part,
    prefix_of,
)
from stratagem.worker.engine.reports import SegmentSummary, StepReport, Tally, mean_loss
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.state import State
from stratagem.worker.exchange.gossip import GossipExchange
from stratagem.worker.exchange.layout import flatten, plan_buckets, unflatten
from stratagem.worker.exchange.public_copies import PublicCopies, neighbour_distance
from stratagem.worker.objectives.evaluator import EvaluationPart, EvaluationShare, Evaluator

# ---- Gossip trainer ----

_NUM_COLUMNS: Final = 6
"""Number of columns in the table of each node's sums over a segment."""


NODE: Final = "node"
"""The word for one of this trainer's models in the names of series and tensors."""


class GossipTrainer:
    """Trainer of the gossip nodes that one member owns. Used by one thread."""

    is_sole_copy: Final = True
    """True: no other member holds these nodes."""

    def __init__(
        self,
        setup: Setup,
        models: Mapping[int, nn.Module],
        weights: Sequence[Mapping[int, float]] = (),
    ) -> None:
        """setup.model: becomes the mean of all nodes at the end of each segment. models: keyed by
        node. weights: mixing weights of each node's neighbours; needed if the job has a codec."""
        job = setup.job
        self.setup, self.model, self.callbacks = setup, setup.model, setup.callbacks
        self._models = LocalModels(setup, models, NODE)
        self._nodes, self.num_steps = self._models.by_number, self._models.num_steps
        params = next(iter(self._nodes.values())).params
        is_coded = job.compression is not None and job.compression.codec != "none"
        self.public = (
            PublicCopies(job, params, list(models), weights, setup.numerics) if is_coded else None
        )
        self.step = 0
        self._num_segment_steps = 0
        strategy = job.strategy
        assert isinstance(strategy, DataParallel)
        self._consensus_every = strategy.options.consensus_every
        self._measured: dict[str, float] = {}
        """The latest exact consensus distance, shown until the next measurement."""

    def expect(self, owned: range, num_shards: int, to_step: int) -> None:
        """Announce the coming steps: micro-batches of this member's nodes are then read ahead."""
        self._models.expect(num_shards, self.step, to_step)

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
        self._models.lower_rates(num_reductions)

    def train_step(
        self,
        exchange: GossipExchange,
        owned: range,
        num_shards: int,
        *,
        stop: bool = False,
        answer: StepAnswer = NO_ANSWER,
    ) -> StepReport:
        """Make a local step of each node of this member, then one round of mixing.

        A node is a shard; `stop` is ignored, as nodes have no step in common. Loss and neighbour
        distance cover this member's nodes; the consensus distance, if the job asks for it, covers
        all nodes after mixing. After an error the trainer cannot be used any more.
        """
        local_steps = self._models.take_step(self.step, owned, num_shards)
        failpoint("worker.gossip.before_mix")
        tensors = {number: node.tensors for number, node in self._nodes.items()}
        waits_since_s = time.perf_counter()
        distances = exchange.mix(self.step + 1, tensors)
        wait_s = time.perf_counter() - waits_since_s
        for number, distance in distances.items():
            self._nodes[number].sums.moved += distance.moved
        self.step += 1
        self._num_segment_steps += 1
        failpoint("worker.gossip.after_mix")
        is_due = self._consensus_every is not None and self.step % self._consensus_every == 0
        if is_due:
            self._measured = {"consensus_distance": consensus_distance(exchange, tensors)}
        return replace(
            local_steps.report(self.step, wait_s),
            metrics={
                "neighbour_distance": neighbour_distance([*distances.values()]),
                **self._measured,
            },
            measured=in_training(self._measured) if is_due else {},
        )

    def end_segment(self, exchange: GossipExchange, tally: Tally) -> SegmentSummary:
        """Set `model` to the mean of all nodes; return the summary over all nodes, with their
        distance to the mean.

        Sums over steps come from the nodes themselves, not from the tally. The mean is over float64
        values in order of node, rounded once; integers are node 0's.
        """
        self._models.check_form()
        models = {number: node.model for number, node in self._nodes.items()}
        squares = take_mean(self.model, models, exchange)
        columns = {
            number: [
                node.sums.weight,
                node.sums.loss,
                node.sums.moved,
                squares[number],
                node.sums.num_skipped,
                node.sums.grad_norm,
            ]
            for number, node in self._nodes.items()
        }
        (table,) = exchange.sum_in_order(
            [_NUM_COLUMNS * exchange.num_nodes],
            lambda n, _: _row(n, exchange.num_nodes, columns[n]).to(self.setup.gather.device),
        )
        logged = self._sum_logged(exchange)
        by_column = [table[i::_NUM_COLUMNS].tolist() for i in range(_NUM_COLUMNS)]
        weight, loss, moved, square, num_skipped = map(math.fsum, by_column[:-1])
        num_rounds = exchange.num_nodes * max(1, self._num_segment_steps)
        for node in self._nodes.values():
            node.sums = LocalSums()
        self._num_segment_steps = 0
        return SegmentSummary(
            loss=mean_loss(loss, weight, num_skipped),
            metrics={
                "consensus_distance": math.sqrt(square / exchange.num_nodes),
                "mixing_distance": math.sqrt(moved / num_rounds),
                "max_grad_norm": max(by_column[-1]),
                **({"skipped_steps": num_skipped} if self._models.rows.window.may_skip else {}),
                **means(logged),
            },
            traffic={} if self.public is None else asdict(self.public.take_traffic()),
        )

    def _sum_logged(self, exchange: GossipExchange) -> LoggedSums:
        """Return the values that all nodes have logged in this segment."""
        if not self.setup.objective.may_log:
            return {}
        sums = {number: node.sums.logged for number, node in self._nodes.items()}
        device = self.setup.gather.device
        (total,) = exchange.sum_in_order([NUM_EXTRAS], lambda n, _: packed(sums[n]).to(device))
        names = next((tuple(logged) for logged in sums.values() if logged), None)
        return unpacked(total, names)

    def evaluator(self) -> Evaluator:
        """Return the evaluator of the mean, as of the last end of a segment."""
        self.model.eval()
        return self.setup.evaluator

    def evaluate(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate this member's share of the batches on the mean of the nodes; return the sums."""
        with constant_buffers(self.model):
            return self.evaluator().parts_of(share)

    def copy_state(
        self, *, is_first: bool = True, into: Mapping[str, Tensor] = state_format.NOTHING
    ) -> State:
        """Copy the state to the CPU, sorted by name: `node<i>/…` of this member's nodes, and the
        mean on the first member. into: tensors that may be overwritten."""
        tensors, metadata = self._state(is_first=is_first)
        return state_format.copied(tensors, into), metadata

    def _state(self, *, is_first: bool) -> State:
        """Return the live tensors and metadata that `copy_state` copies."""
        tensors: dict[str, Tensor] = state_format.model_state(self.model) if is_first else {}
        metadata = state_format.state_metadata(self.step)
        for number, node in self._nodes.items():
            node_tensors, numbers = node.saved.parts()
            public = self.public.state(number) if self.public is not None else {}
            named = {**node_tensors, **public}
            tensors |= {
                f"{prefix_of(NODE, number)}{name}": tensor for name, tensor in named.items()
            }
            metadata |= {
                f"{prefix_of(NODE, number)}{name}": value for name, value in numbers.items()
            }
        return dict(sorted(tensors.items())), metadata

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load a state of all nodes; a state without nodes initialises every node."""
        step = state_format.step_of(metadata)
        state_format.load_model_state(self.model, tensors)
        for number, node in self._nodes.items():
            node_tensors, numbers = (
                own_part(NODE, number, tensors) or tensors,
                own_part(NODE, number, metadata) or metadata,
            )
            node.saved.load_parts(node_tensors, numbers, step)
        if self.public is not None:
            for number in self.public.nodes:
                self.public.load(number, own_part(NODE, number, tensors) or tensors)
        self.step = step

    def fingerprint(self) -> str:
        """Return a fingerprint of this member's nodes and the mean."""
        return state_format.fingerprint(*self._state(is_first=True))


def _row(number: int, num_nodes: int, values: list[float]) -> Tensor:
    """Return a flattened table with a row per node: `values` in this node's row, else zeros."""
    table = torch.zeros(num_nodes, len(values), dtype=torch.float64)
    table[number] = torch.tensor(values, dtype=torch.float64)
    return table.reshape(-1)


# ---- Consensus distance ----


@torch.no_grad()
def consensus_distance(exchange: GossipExchange, tensors: Mapping[int, Sequence[Tensor]]) -> float:
    """Compute the nodes' root mean square distance to their mean: sqrt(Σ_i ‖x_i - mean‖² / N).

    tensors: those of this member's nodes, of the same shapes everywhere. All members call it
    equally often and get the same bits, independent of who owns which nodes. The mean takes one sum
    over all nodes in float64; each member sends at most twice its bytes. Raises ExchangeError.
    """
    first = next(iter(tensors.values()))
    buckets, device = plan_buckets(first), first[0].device

    def term(node: int, index: int) -> Tensor:
        bucket = buckets[index]
        flat = torch.empty(bucket.numel, dtype=torch.float64, device=device)
        return flatten(bucket, tensors[node], flat)

    totals = exchange.sum_in_order([bucket.numel for bucket in buckets], term)
    squares = dict.fromkeys(tensors, 0.0)
    for index, total in enumerate(totals):
        total.div_(exchange.num_nodes)
        for node in tensors:
            away = term(node, index).sub_(total)
            squares[node] += float(torch.dot(away, away))

    def of_node(node: int, _: int) -> Tensor:
        return torch.tensor([squares[node]], dtype=torch.float64, device=device)

    (square,) = exchange.sum_in_order([1], of_node)
    return math.sqrt(float(square) / exchange.num_nodes)


# ---- Mean of all nodes ----
#
# The mean is taken over float64 values in order of node and rounded once; integers are node 0's.


@torch.no_grad()
def take_mean(
    mean: nn.Module, nodes: Mapping[int, nn.Module], exchange: GossipExchange
) -> dict[int, float]:
    """Set `mean` to the mean of all nodes; return the squared distance of each of this member's
    `nodes` from the mean."""
    averages = {number: _averaged(node) for number, node in nodes.items()}
    target, is_param = _averaged(mean), _is_trainable(mean)
    buckets = plan_buckets(target)

    def term(number: int, index: int) -> Tensor:
        bucket = buckets[index]
        flat = torch.empty(bucket.numel, dtype=torch.float64, device=target[0].device)
        return flatten(bucket, averages[number], flat)

    totals = exchange.sum_in_order([bucket.numel for bucket in buckets], term)
    squares = dict.fromkeys(nodes, 0.0)
    for index, (bucket, total) in enumerate(zip(buckets, totals, strict=True)):
        total.div_(exchange.num_nodes)
        unflatten(bucket, total, target)
        for number in nodes:
            away = term(number, index).sub_(total).square_()
            start = 0
            for place in bucket.indices:
                stop = start + target[place].numel()
                if is_param[place]:
                    squares[number] += float(away[start:stop].sum())
                start = stop
    _copy_integers(mean, nodes, exchange)
    return squares


def _copy_integers(
    mean: nn.Module, nodes: Mapping[int, nn.Module], exchange: GossipExchange
) -> None:
    """Copy node 0's integer tensors (counters) into `mean`, through float64, which is exact."""
    integers = {number: _integers(node) for number, node in nodes.items()}
    target = _integers(mean)

    def term(number: int, index: int) -> Tensor:
        flat = integers[number][index].detach().to(torch.float64).reshape(-1)
        return flat if number == 0 else torch.zeros_like(flat)

    totals = exchange.sum_in_order([tensor.numel() for tensor in target], term)
    for tensor, total in zip(target, totals, strict=True):
        tensor.copy_(total.view(tensor.shape))


def _stored(model: nn.Module) -> list[Tensor]:
    """Return the tensors of the state_dict, each tied tensor once."""
    return list({id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def _averaged(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in _stored(model) if tensor.is_floating_point()]


def _is_trainable(model: nn.Module) -> list[bool]:
    return [tensor.requires_grad for tensor in _stored(model) if tensor.is_floating_point()]


def _integers(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _stored(model) if not tensor.is_floating_point()]
