"""What the user's on_evaluation sees of an evaluation, and what it may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem.worker.engine.step.step_view import add_logged


@dataclass(slots=True)
class EvaluationView:
    """One evaluation that is done, as numbers of the whole split. Nothing in it changes the run."""

    step: int
    """Steps behind the state that was evaluated; under Federated, rounds."""
    split: str
    metrics: Mapping[str, float]
    """The loss and the metrics of the job, by name."""
    logged: dict[str, float] = field(default_factory=dict)
    wants_end: bool = False

    def log(self, name: str, value: float) -> None:
        """Makes a number the value of the series `evaluation.<name>` for what was evaluated."""
        add_logged(self.logged, name, value)

    def stop(self) -> None:
        """Ends the training with the state that was evaluated."""
        self.wants_end = True
