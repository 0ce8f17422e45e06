"""The parameters of each turn of a job, and their optimizers: every trained parameter belongs to
exactly one turn."""

from collections.abc import Sequence

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.common.job.turns import TurnSpec
from stratagem.worker.engine.optim.optimizers import OptimizersInOrder, make_optimizer
from stratagem.worker.user_code.entrypoints import EntryPoints

NamedParams = Sequence[tuple[str, nn.Parameter]]


def by_turn(
    turns: Sequence[TurnSpec], params: NamedParams
) -> list[tuple[TurnSpec, list[tuple[str, nn.Parameter]]]]:
    """Returns each turn with its parameters."""
    return [(turn, [(n, p) for n, p in params if turn.holds(n)]) for turn in turns]


def make_optimizer_of(
    job: JobSpec, params: NamedParams, entrypoints: EntryPoints
) -> torch.optim.Optimizer:
    """Makes a fresh optimizer of these parameters as the job says: with turns, that of each turn in
    their order."""
    fused = job.execution.fusion
    if job.turns is None:
        return make_optimizer(job.optimizer, params, fused=fused, entrypoints=entrypoints)
    parts = [
        make_optimizer(turn.optimizer, own, fused=fused, entrypoints=entrypoints)
        for turn, own in by_turn(job.turns, params)
    ]
    return OptimizersInOrder(parts)
