"""The training engine of a worker: steps, evaluation and state; `build_trainer` makes a trainer."""

from stratagem.worker.engine.apart.gossip_trainer import GossipTrainer
from stratagem.worker.engine.apart.local_steps_trainer import LocalStepsTrainer
from stratagem.worker.engine.build_trainer import (
    build_gossip_trainer,
    build_inference,
    build_local_steps_trainer,
    build_sliced_trainer,
    build_trainer,
)
from stratagem.worker.engine.objectives.evaluator import Batch, EvaluationPart, EvaluationShare
from stratagem.worker.engine.step.step_report import SegmentSummary, StepReport, Tally
from stratagem.worker.engine.trainers.inference import Inference
from stratagem.worker.engine.trainers.member_trainer import Exchange, Joined, MemberTrainer
from stratagem.worker.engine.trainers.synchronous_trainer import Trainer

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
    "build_sliced_trainer",
    "build_trainer",
]
