"""Phase training: some steps compute their gradient, the others predict it from earlier ones."""

from stratagem.worker.phases.schedule import PhaseError, TrainingPhase
from stratagem.worker.phases.training import PREFIX, PassTimer, PhaseTraining

__all__ = ["PREFIX", "PassTimer", "PhaseError", "PhaseTraining", "TrainingPhase"]
