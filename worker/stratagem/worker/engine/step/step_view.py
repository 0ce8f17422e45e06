"""What the user's on_step sees of a step, and what it may ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem.worker.engine.objectives.step_function import MAX_LOGGED, check_log_name


@dataclass(slots=True)
class StepView:
    """One step that is done, as numbers. It holds no tensor, and nothing in it changes the run."""

    step: int
    """From 1."""
    loss: float
    weight: float
    """Rows or tokens that the step learned from; 0 when it was left out."""
    num_rows: int
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    metrics: Mapping[str, float]
    """Further numbers about the step."""
    logged: dict[str, float] = field(default_factory=dict)
    wants_end: bool = False

    def log(self, name: str, value: float) -> None:
        """Makes a number part of the series `train.<name>`, which has the latest one of each
        segment."""
        add_logged(self.logged, name, value)

    def stop(self) -> None:
        """Ends the training with this step, on all workers."""
        self.wants_end = True


def add_logged(logged: dict[str, float], name: str, value: float) -> None:
    """Adds a number that the user's code logs of one view; raises ValueError unless it may."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; view.log takes finite numbers")
    check_log_name(name)
    if name not in logged and len(logged) == MAX_LOGGED:
        raise ValueError(f"{name!r} is one name too many; view.log takes {MAX_LOGGED} at once")
    logged[name] = number
