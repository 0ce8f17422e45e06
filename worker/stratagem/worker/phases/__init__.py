"""Phase training: some steps compute their gradient, the others predict it from earlier ones.

`PhaseTraining` is what a trainer uses; `phase_schedule` is the pure state machine inside it.
"""

from stratagem.worker.phases.phase_schedule import PhaseError, TrainingPhase
from stratagem.worker.phases.phase_training import PREFIX, PhaseTraining
from stratagem.worker.phases.step_timer import PassTimer

__all__ = ["PREFIX", "PassTimer", "PhaseError", "PhaseTraining", "TrainingPhase"]
