"""Build a trainer from a job: its model, data, objective and metrics.

This is the only module that knows all of these parts by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.data.order import epoch_rows_of
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine import state_format
from stratagem.worker.engine.callbacks import Callbacks, make_callbacks
from stratagem.worker.engine.gossip import GossipTrainer
from stratagem.worker.engine.local_steps import LocalStepsTrainer
from stratagem.worker.engine.round_trip import check_optimizer_of
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.models.build import build_model
from stratagem.worker.numerics.model import ModelExecution, make_gather, prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.evaluator import EvaluationPart, make_evaluator
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Inference ----
#
# An `Inference` evaluates a stored state, in a job that trains or in one that does not. It records
# no graph and has no optimizer, so it needs the memory of the weights and of one batch. Where
# nothing is trained, full batches are compiled if the job says so.


class Inference:
    """The model and data of one session that evaluates without training. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.job, self.model = setup, setup.job, setup.model
        self.evaluator = setup.evaluator
        self.num_steps = 0
        self.model.eval()
        if self.job.evaluation is not None:
            self.evaluator.dataset(self.job.evaluation.split)

    def part(
        self, split: str, batch: int, outputs: dict[str, Tensor] | None = None
    ) -> EvaluationPart:
        """Return the evaluation sums of one batch, which do not depend on other batches.

        outputs: receives copies of the model's outputs on the CPU, (rows, ...) each: `output`, or
        `output.<key>` if the model returns several.
        """

        def keep(output: Any, num_rows: int) -> None:
            assert outputs is not None
            outputs.update(_copies("output", output, num_rows))

        # A model that is trained may compute gradients of its own inside its forward pass.
        with torch.inference_mode(self.job.only_evaluates):
            return self.evaluator.part(split, batch, None if outputs is None else keep)

    def copy_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (the model's tensors by name, metadata), copied to the CPU; the step is 0."""
        tensors = state_format.copied(state_format.model_state(self.model))
        return tensors, state_format.state_metadata(step=0)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the model's tensors from a state; ignore all other tensors."""
        state_format.load_model_state(self.model, tensors)


def _copies(name: str, output: Any, num_rows: int) -> Iterator[tuple[str, Tensor]]:
    match output:
        case Tensor() if output.shape[:1] == (num_rows,):
            yield name, torch.empty_like(output, device="cpu").copy_(output).contiguous()
        case Mapping():
            for key, item in output.items():
                yield from _copies(f"{name}.{key}", item, num_rows)
        case tuple() | list():
            for key, item in enumerate(output):
                yield from _copies(f"{name}.{key}", item, num_rows)
        case _:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            text = f"the model's {name} is no tensor of {num_rows} rows, but {shape}"
            raise InvalidInputError.at("evaluation.predictions", text)


# ---- Trainers ----


def build_trainer(  # noqa: PLR0913  (as many as there are to give)
    job: JobSpec,
    entrypoints: EntryPoints,
    share: StateShare | None = None,
    *,
    device: torch.device,
    fresh: bool,
    sources: DataSources | None = None,
    numerics: int = CURRENT,
    folder: Path | None = None,
) -> Trainer:
    """Build the trainer of a synchronous job.

    share: the slice of the optimizer's state that is kept here; None: all. fresh: the model is
    initialised from the seed; otherwise load_state comes first. folder: see build_model.
    """
    return Trainer(_setup(job, entrypoints, device, fresh, sources, numerics, folder), share)


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
    """Build a model of the job for inference only.

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
    """Build a trainer of gossip nodes, each with its own model; load_state must come first.

    weights: the mixing weights of each node's neighbours; needed if the job has a codec.
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
    """Build a trainer of replicas with local steps and separate models; load_state comes first."""
    setup = _setup(job, entrypoints, device, False, sources, numerics)
    return LocalStepsTrainer(setup, _models(job, entrypoints, device, replicas, setup))


def _models(
    job: JobSpec, entrypoints: EntryPoints, device: torch.device, numbers: range, setup: Setup
) -> dict[int, nn.Module]:
    """Build one model for each of the numbered nodes or replicas, trained separately."""
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
    """Collect the parts of a trainer, after changing the model as section `execution` asks."""
    callbacks = make_callbacks(job, entrypoints)
    callbacks.built(model)
    randomness = KeyedRandomness(model, gather.device)
    execution = prepare(model, job, gather.device, randomness, numerics)
    return collect_setup(
        job, entrypoints, model, data, gather, randomness, execution, callbacks, numerics
    )


def collect_setup(  # noqa: PLR0913  (the one place that puts all of them together)
    job: JobSpec,
    entrypoints: EntryPoints,
    model: nn.Module,
    data: Mapping[str, Dataset],
    gather: Gather,
    randomness: KeyedRandomness,
    execution: ModelExecution,
    callbacks: Callbacks,
    numerics: int,
) -> Setup:
    """Collect the parts of a trainer, and make its evaluator; the model is used as it is."""
    evaluator = make_evaluator(
        job, entrypoints, model, data, execution, randomness, gather, numerics
    )
    return Setup(
        *(job, model, data, evaluator.objective, gather, evaluator, randomness, execution),
        *(numerics, entrypoints, epoch_rows_of(job, data, entrypoints), callbacks),
    )
