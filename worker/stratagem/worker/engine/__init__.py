"""The training engine of a worker: steps, evaluation, client rounds, state.

`build_trainer` and `run_client_round` are what the rest of the worker uses.
"""

from stratagem.worker.engine.build import build_gossip_trainer, build_inference, build_trainer
from stratagem.worker.engine.client_round import ClientRound, ClientRunner, run_client_round
from stratagem.worker.engine.evaluate import Part
from stratagem.worker.engine.gossip import GossipTrainer, Summary
from stratagem.worker.engine.inference import Inference
from stratagem.worker.engine.report import StepReport
from stratagem.worker.engine.trainer import Trainer

__all__ = [
    "ClientRound",
    "ClientRunner",
    "GossipTrainer",
    "Inference",
    "Part",
    "StepReport",
    "Summary",
    "Trainer",
    "build_gossip_trainer",
    "build_inference",
    "build_trainer",
    "run_client_round",
]
