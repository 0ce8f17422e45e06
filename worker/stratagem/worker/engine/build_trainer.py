"""Puts a trainer together from a job: model, data, objective, metrics.

The only place that knows all of them by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.data.data_sources import DataSources, load_data
from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.data.order.row_order import epoch_rows_of
from stratagem.worker.engine.apart.gossip_trainer import GossipTrainer
from stratagem.worker.engine.apart.local_steps_trainer import LocalStepsTrainer
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.memory_modes import make_gather
from stratagem.worker.engine.numerics.prepare_model import prepare
from stratagem.worker.engine.objectives.evaluator import make_evaluator
from stratagem.worker.engine.step.callbacks import make_callbacks
from stratagem.worker.engine.step.optimizer_round_trip import check_optimizer_of
from stratagem.worker.engine.trainers.inference import Inference
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.engine.trainers.synchronous_trainer import Trainer
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.models.model_builder import build_model
from stratagem.worker.user_code.entrypoints import EntryPoints


def build_trainer(
    job: JobSpec,
    entrypoints: EntryPoints,
    *,
    device: torch.device,
    fresh: bool,
    sources: DataSources | None = None,
    numerics: int = CURRENT,
    folder: Path | None = None,
) -> Trainer:
    """Builds the trainer of a synchronous job.

    fresh: the model is initialised from the seed; otherwise load_state must come first. folder: see
    build_model.
    """
    return Trainer(_setup(job, entrypoints, device, fresh, sources, numerics, folder))


def build_sliced_trainer(
    job: JobSpec,
    entrypoints: EntryPoints,
    share: StateShare,
    *,
    device: torch.device,
    fresh: bool,
    sources: DataSources | None = None,
    numerics: int = CURRENT,
) -> Trainer:
    """Builds a trainer that keeps only its share of the optimizer's state.

    fresh: the model is initialised from the seed; otherwise load_state must come first.
    """
    return Trainer(_setup(job, entrypoints, device, fresh, sources, numerics), share)


def build_inference(
    job: JobSpec,
    entrypoints: EntryPoints,
    *,
    device: torch.device,
    fresh: bool,
    sources: DataSources | None = None,
    numerics: int = CURRENT,
    folder: Path | None = None,
) -> Inference:
    """Builds a model of the job that is only run.

    fresh: the model is initialised from the seed; otherwise load_state must come first. folder: see
    build_model.
    """
    return Inference(_setup(job, entrypoints, device, fresh, sources, numerics, folder))


def build_gossip_trainer(
    job: JobSpec,
    entrypoints: EntryPoints,
    nodes: range,
    *,
    device: torch.device,
    sources: DataSources | None = None,
    weights: Sequence[Mapping[int, float]] = (),
    numerics: int = CURRENT,
) -> GossipTrainer:
    """Builds a trainer of these nodes, each with a model of its own; load_state must come first.

    weights: of each node's neighbours; needed where the job has a codec.
    """
    setup = _setup(job, entrypoints, device, False, sources, numerics)
    return GossipTrainer(setup, _models(job, entrypoints, device, nodes, setup), weights)


def build_local_steps_trainer(
    job: JobSpec,
    entrypoints: EntryPoints,
    replicas: range,
    *,
    device: torch.device,
    sources: DataSources | None = None,
    numerics: int = CURRENT,
) -> LocalStepsTrainer:
    """Builds a trainer of these replicas, each with a model of its own; load_state must come
    first."""
    setup = _setup(job, entrypoints, device, False, sources, numerics)
    return LocalStepsTrainer(setup, _models(job, entrypoints, device, replicas, setup))


def _models(
    job: JobSpec, entrypoints: EntryPoints, device: torch.device, numbers: range, setup: Setup
) -> dict[int, nn.Module]:
    """Builds models that train apart from each other."""
    made = {n: build_model(job, entrypoints, device=device, fresh=False) for n in numbers}
    for model in made.values():
        setup.callbacks.built(model)
    return made


def _setup(
    job: JobSpec,
    entrypoints: EntryPoints,
    device: torch.device,
    fresh: bool,
    sources: DataSources | None,
    numerics: int,
    folder: Path | None = None,
) -> Setup:
    sources = sources or DataSources()
    data = load_data(job, entrypoints, sources, numerics=numerics)
    changes: list[str] = []
    model = build_model(
        job, entrypoints, device=device, fresh=fresh, folder=folder, say=changes.append
    )
    check_optimizer_of(job, model, entrypoints)
    gather = make_gather(job, model, device, sources.readers)
    setup = make_setup(job, entrypoints, model, data, gather, numerics)
    return replace(setup, conversion="".join(changes))


def make_setup(
    job: JobSpec,
    entrypoints: EntryPoints,
    model: nn.Module,
    data: Mapping[str, Dataset],
    gather: Gather,
    numerics: int = CURRENT,
) -> Setup:
    """Makes the parts of a trainer of this model, which is changed as the job's execution says."""
    callbacks = make_callbacks(job, entrypoints)
    callbacks.built(model)
    randomness = KeyedRandomness(model, gather.device)
    execution = prepare(model, job, gather.device, randomness, numerics)
    evaluator = make_evaluator(
        job, entrypoints, model, data, execution, randomness, gather, numerics
    )
    order = epoch_rows_of(job, data, entrypoints)
    return Setup(
        job=job,
        model=model,
        data=data,
        objective=evaluator.objective,
        gather=gather,
        evaluator=evaluator,
        randomness=randomness,
        execution=execution,
        numerics=numerics,
        entrypoints=entrypoints,
        callbacks=callbacks,
        epoch_rows=order,
    )
