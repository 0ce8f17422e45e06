"""The training engine of a worker: steps, evaluation and state; `build_trainer` makes a trainer."""

from stratagem.worker.engine.build import (
    Inference,
    build_gossip_trainer,
    build_inference,
    build_local_steps_trainer,
    build_trainer,
)
from stratagem.worker.engine.gossip import GossipTrainer
from stratagem.worker.engine.local_steps import LocalStepsTrainer
from stratagem.worker.engine.reports import SegmentSummary, StepReport, Tally
from stratagem.worker.engine.state import Exchange, Joined, MemberTrainer
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.objectives.evaluator import Batch, EvaluationPart, EvaluationShare

__all__ = [
    "Batch",
    "EvaluationPart",
    "EvaluationShare",
    "Exchange",
    "GossipTrainer",
    "Inference",
    "Joined",
    "LocalStepsTrainer",
    "MemberTrainer",
    "SegmentSummary",
    "StepReport",
    "Tally",
    "Trainer",
    "build_gossip_trainer",
    "build_inference",
    "build_local_steps_trainer",
    "build_trainer",
]
