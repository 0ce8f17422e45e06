"""The learning rates of a step, by the names of their series: what all reports of a step show.

`train.lr`; with groups `train.lr.<group>`, of which one is `default`; with turns `train.lr.<turn>`
and `train.lr.<turn>.<group>`. They follow from the job and the step alone, so all members of a
party say the same, also those that hold no parameter of a group.
"""

from typing import Final

from stratagem.common.job import OptimizerSpec
from stratagem.worker.engine.optim.shadow_schedule import ShadowSchedule

SERIES: Final = "train.lr"


class ReportedRates:
    """The rates of one optimizer's updates. Used by one thread.

    Of an optimizer by entry point that makes groups of its own, it is the rate that the job gives.
    """

    def __init__(self, spec: OptimizerSpec | None, turn: str = "") -> None:
        """spec: None where nothing is trained, which has no rates. turn: in which it is used."""
        rules = () if spec is None else spec.rules()
        groups = {name: lr for rule in rules for name, (lr, _) in rule.groups.items()}
        stem = f"{SERIES}.{turn}" if turn else SERIES
        is_grouped = spec is not None and spec.groups
        self._names = {group: f"{stem}.{group}" if is_grouped else stem for group in groups}
        self._plateau = None if spec is None else spec.plateau
        self._full = {self._names[group]: lr for group, lr in groups.items()}
        self._current = self._full

    def lower(self, num_reductions: int) -> None:
        """Takes the rates after as many reductions of a plateau, from the next update on."""
        if (plateau := self._plateau) is not None:
            self._current = {
                name: plateau.reduced(lr, num_reductions) for name, lr in self._full.items()
            }

    def of_update(self, factor: float, schedule: ShadowSchedule | None = None) -> dict[str, float]:
        """Returns the rates of the update that comes next, by series.

        factor: of our own schedule in this step. schedule: the user's, whose values count instead.
        """
        if schedule is not None:
            rates = schedule.learning_rates()
            return {name: rates[group] for group, name in self._names.items()}
        return {name: lr * factor for name, lr in self._current.items()}
