"""Measures the peak of training steps of one worker that are done for real.

They are the steps that `simulated_step` and `simulated_local_steps` play with fake tensors, by the
same engine on the job's own rows.
"""

from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from stratagem.common.job import JobSpec
from stratagem.common.strategy import local_steps_of
from stratagem.tools.planning.job_site import Site
from stratagem.tools.planning.simulated_local_steps import (
    NUM_ROUNDS,
    build_replicas,
    local_exchange,
    play_round,
    shortened,
)
from stratagem.tools.planning.simulated_step import NUM_STEPS, gradient_buckets, receive_buffers
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_model
from stratagem.worker.numerics.model import make_gather

MAX_STEPS: Final = 32
"""Enough for a scale of the loss to come down."""


def measure_training(job: JobSpec, site: Site, party: ShardOwners) -> int:
    """The peak of the same steps, done for real: bytes that torch's allocator gave out."""
    data = site.data_of(job)
    steps = _steps if local_steps_of(job.strategy) is None else _local_steps
    if site.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(site.device)
        before = torch.cuda.memory_allocated(site.device)
        steps(job, site, data, party)
        return torch.cuda.max_memory_allocated(site.device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = steps(job, site, data, party)
    del held
    return _peak_of(recorded)


def _peak_of(recorded: profile) -> int:
    """The highest sum of allocations less what was freed, in the order of time."""
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    assert results is not None
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]  # the stub lacks it
        for event in results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _steps(job: JobSpec, site: Site, data: dict[str, Dataset], party: ShardOwners) -> object:
    """Return what the steps hold in the end."""
    model = build_model(job, site.entrypoints, device=site.device, fresh=True)
    gather = make_gather(job, model, site.device)
    trainer = Trainer(make_setup(job, site.entrypoints, model, data, gather))
    buckets = gradient_buckets(trainer, party)
    received = receive_buffers(buckets, party)
    exchange = GradientReducer(buckets, party, SoloTransport(), trainer.compressor)
    for step in range(1, MAX_STEPS + 1):
        is_whole = bool(trainer.optimizer.state) or not _skips(job)
        trainer.train_step(exchange, party.owned, party.num_shards)
        if step >= NUM_STEPS and is_whole:
            break
    del received
    return trainer, buckets


def _local_steps(job: JobSpec, site: Site, data: dict[str, Dataset], party: ShardOwners) -> object:
    """Likewise, of replicas that take local steps."""
    num_rounds = MAX_STEPS if _skips(job) else NUM_ROUNDS
    short = shortened(job, num_rounds)
    common = build_model(job, site.entrypoints, device=site.device, fresh=True)
    gather = make_gather(job, common, site.device)
    setup = make_setup(short, site.entrypoints, common, data, gather)
    trainer = build_replicas(job, site, setup, party)
    exchange, received = local_exchange(trainer, party)
    for _ in range(num_rounds):
        play_round(trainer, exchange, party, short)
    del received
    return trainer, exchange


def _skips(job: JobSpec) -> bool:
    """Return whether first steps may change nothing because the loss is still scaled too far."""
    return job.execution.precision in ("Mixed", "Half") and job.execution.amp_dtype == "float16"
