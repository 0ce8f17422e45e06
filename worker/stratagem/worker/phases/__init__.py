"""Phase training: some steps compute their gradient, the others predict it from earlier ones.

`PhaseTraining` is what a trainer uses; `phase_schedule` is the pure state machine inside it.
"""

from stratagem.worker.phases.schedule import PhaseError, TrainingPhase
from stratagem.worker.phases.training import PREFIX, PassTimer, PhaseTraining

__all__ = ["PREFIX", "PassTimer", "PhaseError", "PhaseTraining", "TrainingPhase"]
