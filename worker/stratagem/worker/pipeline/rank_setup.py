"""The parts of a rank of a pipeline, as its training step and its evaluation take them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.data.order.sampler import EpochRows
from stratagem.worker.engine.numerics.prepare_model import ModelExecution
from stratagem.worker.engine.objectives.evaluator import Evaluator
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.models.model_nodes import Trained
from stratagem.worker.pipeline.rank_pass import StageChannel
from stratagem.worker.pipeline.stage import StagePart
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """The parts that a runner is made of. `model` holds this rank's nodes only, under their full
    names."""

    job: JobSpec
    model: nn.Module
    trained: list[Trained]
    """All trainable parameters of the whole model, in its order, with all their copies."""
    parts: Mapping[int, StagePart]
    lane: StageChannel
    data: Mapping[str, Dataset]
    evaluator: Evaluator
    micro_batch_size: int | None
    schedule: str
    execution: ModelExecution
    numerics: int
    """Which rules decide the bits; see stratagem.common.numerics.rules."""
    entrypoints: EntryPoints
    callbacks: Callbacks
    epoch_rows: EpochRows | None
    """The order of the training rows; they are shuffled unless set."""
