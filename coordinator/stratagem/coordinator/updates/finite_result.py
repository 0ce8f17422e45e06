"""Check that the numbers that a fold has made are finite, before any of them is committed.

Numbers that were not finite in the state that the round began from, such as a mask of infinities,
are no fault of the fold and stay as they are, to the bit. Anything else has left the range of its
type, and would do so again: the error names the rule, the tensor, and the setting to lower.
"""

from bisect import bisect_right
from dataclasses import asdict
from typing import Final, NamedTuple, NoReturn

import numpy as np

from stratagem.common.base.errors import DivergedError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, FedYogi
from stratagem.common.tensors.manifest import Manifest, dtype_named
from stratagem.coordinator.updates.floats import Raw, finite_elements, is_finite
from stratagem.coordinator.updates.reading import StateReader

_RATE: Final = "optimizer.lr"


class Rule(NamedTuple):
    """The rule that computes the next numbers, described for error messages."""

    name: str
    settings: str
    """The settings to lower if the numbers of the rule become too large."""


MEAN: Final = Rule("the weighted mean of the updates", _RATE)
LATE: Final = Rule("the changes of late updates", f"{_RATE}, or strategy.options.max_staleness")
SERVER: Final = Rule("the server optimizer", "its learning rate")
AVERAGE: Final = Rule("weight_average", _RATE)


class FiniteResult:
    """Checks the results of one fold, window by window, for numbers that are not finite."""

    def __init__(self, manifest: Manifest, rule: Rule, base: StateReader | None = None) -> None:
        """Take the context of the checks. manifest: the manifest of the state, which locates the
        windows. rule: the rule that computes the numbers, unless a check names another one. base:
        the state that the round began from."""
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._offsets = [spec.offset for spec in self._specs]
        self._rule, self._base = rule, base

    def check(
        self,
        dtype: str,
        offset: int,
        result: Raw,
        *,
        rule: Rule | None = None,
        before: Raw | None = None,
    ) -> None:
        """Check one window of results; restore elements that were not finite before the fold.

        before: the elements that the results were computed from; by default those of the base, if
        there is one. Raises DivergedError if another element is not finite.
        """
        if is_finite(dtype, result):
            return
        wrong = ~finite_elements(dtype, result)
        if before is None and self._base is not None:
            before = self._base.read_raw(dtype, offset, result.size)
        if before is not None:
            were_wrong = ~finite_elements(dtype, before)
            np.copyto(result, before, where=wrong & were_wrong)
            wrong &= ~were_wrong
        if wrong.any():
            self.refuse(dtype, offset, int(np.argmax(wrong)), rule=rule)

    def refuse(
        self, dtype: str, offset: int, place: int, *, rule: Rule | None = None, kept_as: str = ""
    ) -> NoReturn:
        """Raise DivergedError for one element of a window. kept_as: its type, if that is not the
        type in the state."""
        at = offset + place * dtype_named(dtype).item_bytes
        name, maker = self._specs[bisect_right(self._offsets, at) - 1].name, rule or self._rule
        raise DivergedError(
            f"{maker.name} leads {name!r} beyond the range of {kept_as or dtype}; "
            f"lower {maker.settings}"
        )


def server_rule(strategy: Federated) -> Rule:
    """Return the rule that the strategy's server optimizer applies, for error messages."""
    options, path = strategy.options, "strategy.options"
    if isinstance(strategy.aggregation, FedYogi) or options.server_optimizer is None:
        name, rate = "fedyogi", options.server_learning_rate
        return Rule(f"the server optimizer {name}", f"{path}.server_learning_rate ({rate:g})")
    chosen = options.server_optimizer
    setting = f"{path}.server_optimizer.learning_rate ({chosen.learning_rate:g})"
    return Rule(f"the server optimizer {asdict(chosen)['name']}", setting)


def fold_rule(job: JobSpec, strategy: Federated) -> Rule:
    """Return the rule by which the job combines updates, before a server optimizer, for errors."""
    options, path = strategy.options, "strategy.options"
    if options.secure_aggregation is not None:
        return Rule("the sum of the masked changes", _RATE)
    if job.privacy is not None and job.privacy.unit == "client":
        return Rule("the noised sum of the changes", "privacy.clip.norm, or the noise")
    if options.robust is not None:
        return Rule(f"{path}.robust ({asdict(options.robust)['name']})", _RATE)
    if options.normalize is not None:
        return Rule(f"the changes of the clients, by their steps ({path}.normalize),", _RATE)
    if options.q is not None:
        return Rule(f"the changes of the clients, by their losses ({path}.q),", _RATE)
    if options.control is not None:
        return Rule(f"the mean of the clients and of their corrections ({path}.control)", _RATE)
    return MEAN
