"""Gradient descent with phases on ½·Σ qᵢ·wᵢ², whose exact answers are known."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from stratagem.common.job.schedules import PhasesSpec
from stratagem.worker.phases import PhaseTraining, TrainingPhase

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Descent:
    """steps: until ‖w‖ has shrunk to the tolerance; infinite where it has not."""

    steps: float
    exact_steps: int


def sgd_steps(q: float) -> int:
    """Steps that gradient descent needs."""
    shrink = abs(1 - q)
    return 1 if shrink < TOLERANCE else math.ceil(math.log(TOLERANCE) / math.log(shrink))


def steps_to_converge(spec: PhasesSpec, qs: list[float], most: int) -> Descent:
    curvature = torch.tensor(qs, dtype=torch.float64)
    param = nn.Parameter(torch.ones_like(curvature))
    phases = PhaseTraining(spec, [("w", param)])
    target = TOLERANCE * param.norm().item()
    num_exact = 0
    with torch.no_grad():
        for step in range(most + 1):
            if param.norm().item() <= target:
                return Descent(step, num_exact)
            if phases.phase is TrainingPhase.PREDICT:
                gradient = phases.predict()[0]
                assert gradient is not None
                phases.end_predicted()
            else:
                gradient = curvature * param
                phases.take([gradient], (curvature * param * param).sum().item() / 2)
                num_exact += 1
            param.sub_(gradient)
    return Descent(math.inf, num_exact)
