"""Plays steps of the replicas of one worker that take local steps, with fake tensors or for real.

The engine's own trainer is run over two rounds, which are made as short as fragments and overlap
allow: the first makes what is kept from step to step, the second holds it all. Parameters, not
steps, decide the memory. A codec of what is exchanged works on values and is left out. Must not
know what an estimate is for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stratagem.common.compression import TensorLayout
from stratagem.common.job import JobSpec
from stratagem.common.strategy import DataParallel, local_steps_of
from stratagem.tools.planning.job_site import Site
from stratagem.tools.planning.live_bytes import LiveBytes
from stratagem.tools.planning.simulated_step import (
    Reading,
    ShapedRows,
    gather_shapes,
    hold_cached,
    load_rows,
    receive_buffers,
)
from stratagem.worker.engine import LocalStepsTrainer, state_format
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.local_steps import OUTER
from stratagem.worker.engine.setup import Setup
from stratagem.worker.exchange.layout import ShardOwners, num_sets
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.sliced_reducer import FragmentExchange
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_model, build_shapes

NUM_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class ReplicasReading:
    """What a worker holds of its replicas and of what joins them, in bytes."""

    reading: Reading
    """All of it, in the parts of any other training."""
    common: int
    """Of `reading.parameters`: what the replicas have in common."""
    momentum: int
    """Of `reading.optimizer`: the outer optimizer's."""
    sums: int
    """Of `reading.gradients`: outer gradients, and what of them is received from others."""
    num_fragments: int


def play_local_steps(job: JobSpec, site: Site, party: ShardOwners) -> ReplicasReading:
    """Measure, with fake tensors, what two rounds of the party's first member hold."""
    data = load_rows(job, site)
    gather = gather_shapes(job, site, data)
    # Whole batches only, and steps after those that are played: the last one joins all at once.
    num_rows, short = min(job.batch_size, len(data["train"])), shortened(job)
    unordered = job.data.with_changes(order=None)
    whole = short.altered(batch_size=num_rows, data=unordered)
    batches = {**data, "train": ShapedRows(num_rows)}
    live = LiveBytes(site.device)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        common = build_shapes(job, site.entrypoints, device=site.device)
        gather = gather.fitted(job, common)
        setup = make_setup(whole, site.entrypoints, common, batches, gather)
        models = {
            number: build_shapes(job, site.entrypoints, device=site.device)
            for number in party.owned
        }
        trainer = _trainer(setup, models)
        parameters = live.size_of(_parameters_of(common, *models.values()))
        cached = hold_cached(job, data, gather)
        buffers = live.live - parameters
        exchange, received = local_exchange(trainer, party)
        sums = live.live - buffers - parameters
        for _ in range(NUM_ROUNDS):
            live.forget_peak()
            play_round(trainer, exchange, party, short)
        own = live.size_of(_gradients_of(*models.values()))
        peak, before_backward = live.peak, live.before_backward
        state = _state_after(trainer)
        inner = [t for n, t in state.items() if f"/{state_format.OPTIMIZER}" in n]
        momentum = live.size_of(t for n, t in state.items() if n.startswith(OUTER))
        optimizer = live.size_of(inner) + momentum
        del received, cached
    reading = Reading(
        parameters=parameters,
        buffers=buffers,
        gradients=sums + own,
        optimizer=optimizer,
        # The replica whose turn it is has dropped its gradients by then.
        before_backward=before_backward + own // len(models),
        peak=peak,
        num_parameters=sum(param.numel() for param in common.parameters()),
        state=sum(tensor.nbytes for tensor in state.values()),
        layout=tuple(
            TensorLayout(name, tuple(param.shape))
            for name, param in common.named_parameters()
            if param.requires_grad
        ),
    )
    return ReplicasReading(
        reading=reading,
        common=parameters // (1 + len(models)),
        momentum=momentum,
        sums=sums,
        num_fragments=len(trainer.fragments),
    )


def build_replicas(job: JobSpec, site: Site, setup: Setup, party: ShardOwners) -> LocalStepsTrainer:
    """Build the trainer of the party's first member for real, from the common model of the
    setup."""
    models = {
        number: build_model(job, site.entrypoints, device=site.device, fresh=False)
        for number in party.owned
    }
    trainer = _trainer(setup, models)
    trainer.load_state(state_format.model_state(setup.model), state_format.state_metadata(0))
    return trainer


def _trainer(setup: Setup, models: Mapping[int, nn.Module]) -> LocalStepsTrainer:
    for model in models.values():
        setup.callbacks.built(model)
    return LocalStepsTrainer(setup, models)


def shortened(job: JobSpec, num_rounds: int = NUM_ROUNDS) -> JobSpec:
    """The same job with the shortest rounds that cut and apply in the same order, and with more
    steps than so many of them have."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    overlap = min(1, strategy.options.overlap_steps)
    num_steps = strategy.options.fragments * (1 + overlap)
    options = replace(
        strategy.options,
        local_steps=num_steps,
        overlap_steps=overlap,
        mix=strategy.options.mixed_share,
        outer_bits=None,
    )
    played = replace(strategy, options=options)
    more = num_rounds * num_steps + 1
    return job.altered(strategy=played, steps=more, epochs=None)


def local_exchange(
    trainer: LocalStepsTrainer, party: ShardOwners
) -> tuple[FragmentExchange, list[object]]:
    """Return an exchange that sums what the member itself has, and the buffers in which it would
    receive the sums of others."""
    for fragment in trainer.fragments:
        fragment.buckets.tensors(num_sets(party) - 1)
    received = [receive_buffers(each.buckets, party) for each in trainer.fragments]
    reducers = [GradientReducer(each.buckets, party, SoloTransport()) for each in trainer.fragments]
    return FragmentExchange(reducers), received


def play_round(
    trainer: LocalStepsTrainer, exchange: FragmentExchange, party: ShardOwners, job: JobSpec
) -> None:
    """Make the steps of one round of a shortened job."""
    for _ in range(local_steps_of(job.strategy) or 0):
        trainer.train_step(exchange, party.owned, party.num_shards)


def _state_after(trainer: LocalStepsTrainer) -> Mapping[str, Tensor]:
    """What a commit copies, with sums that are under way, as at the end of a segment."""
    for fragment in trainer.fragments:
        fragment.arrive(trainer.step)
    tensors, _ = trainer.live_state()
    return tensors


def _parameters_of(*models: nn.Module) -> Iterable[Tensor]:
    return [param for model in models for param in model.parameters()]


def _gradients_of(*models: nn.Module) -> Iterable[Tensor]:
    grads = (param.grad for model in models for param in model.parameters())
    return [grad for grad in grads if grad is not None]
