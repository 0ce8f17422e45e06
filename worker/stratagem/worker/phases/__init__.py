"""Phase training: which steps compute their gradient, which predict it, and from what.

`PhaseTraining` is what a trainer uses; `schedule` is the pure state machine inside it.
"""

from stratagem.worker.phases.schedule import Phase, PhaseError
from stratagem.worker.phases.timer import PassTimer
from stratagem.worker.phases.training import PREFIX, PhaseTraining

__all__ = ["PREFIX", "PassTimer", "Phase", "PhaseError", "PhaseTraining"]
