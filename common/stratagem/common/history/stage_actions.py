"""What a stage of a pipeline has done in one step, and when, as values of the step history.

Of each segment its last step is told, in a party of its own beside that of the stage, and of a run
that of its newest segment is kept. Times are seconds since the worker of the stage has begun the
step, by its own clock, in whole units of 2^-20 s: that is what they are good for, and such numbers
take little room.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

PREFIX: Final = "action."
"""Of the names of all series."""
MAX_ACTIONS: Final = 64
"""Of one stage that are told: 3 values each, and fewer than a party has series."""
MIN_WAIT_S: Final = 1e-5
"""A shorter one is as long as it takes to see that nothing is waited for, and is not told."""
NONE: Final = -1
"""Instead of a micro-batch, of what is done once for all of them."""

_PARTY: Final = "actions"
_UNITS_PER_S: Final = 1 << 20
_VALUE: Final = re.compile(r"action\.([a-z]+)(?:\.(\d{1,9}))?\.(begin_s|end_s|wait_s)")
_SOURCE: Final = re.compile(r"action\.from\.(\d{1,9})")


@dataclass(frozen=True, slots=True)
class StageAction:
    """One piece of work of a stage."""

    kind: str
    """forward, backward, input and weight (the two halves of a backward pass), exchange (the sums
    over micro-batches, stages and replicas), optimizer."""
    micro_batch: int
    """Counted over all shards of the worker; NONE of what is done once."""
    begin_s: float
    end_s: float
    wait_s: float = 0.0
    """That the stage waited, before it, for what other stages had to send."""


def party_of_stage(stage: int) -> str:
    """Return the name of the part of a party that tells of a stage."""
    return f"{_PARTY}/{stage}"


def is_of_newest_segment(party: str) -> bool:
    """Return whether of a party only the newest segment is kept."""
    return party.rpartition("/")[0].rpartition("/")[2] == _PARTY


def told(actions: Sequence[StageAction]) -> list[StageAction]:
    """Return at most MAX_ACTIONS of these: of every so many micro-batches, and of the last one."""
    numbers = sorted({each.micro_batch for each in actions if each.micro_batch != NONE})
    stride = 1
    chosen = set(numbers)
    while sum(each.micro_batch in chosen for each in actions) > MAX_ACTIONS - 2:
        stride *= 2
        chosen = {*numbers[::stride], numbers[-1]}
        if len(chosen) < 3:
            break
    return [each for each in actions if each.micro_batch == NONE or each.micro_batch in chosen]


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage has done in a step."""

    rank: int
    """Of its worker among those of the pipeline."""
    sources: Sequence[int]
    """The stages that it receives activations from, and sends gradients to."""
    actions: Sequence[StageAction]
    began_s: float = 0.0
    """When the worker has begun the step, by its clock."""
    clock: int = 0
    """Workers with the same number have the same clock; 0: it has none."""

    @property
    def values(self) -> dict[str, float]:
        """By name of the series."""
        values = {
            f"{PREFIX}rank": float(self.rank),
            f"{PREFIX}began_s": _rounded(self.began_s),
            f"{PREFIX}clock": float(self.clock),
        }
        values |= {f"{PREFIX}from.{stage}": 1.0 for stage in self.sources}
        for each in self.actions:
            number = "" if each.micro_batch == NONE else f".{each.micro_batch}"
            name = f"{PREFIX}{each.kind}{number}"
            values[f"{name}.begin_s"] = _rounded(each.begin_s)
            values[f"{name}.end_s"] = _rounded(each.end_s)
            if each.wait_s >= MIN_WAIT_S:
                values[f"{name}.wait_s"] = _rounded(each.wait_s)
        return values

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Return the report that these are the values of, its actions in order of time; without
        what is incomplete."""
        found: dict[tuple[str, int], dict[str, float]] = {}
        sources: list[int] = []
        for name, value in values.items():
            if its := _VALUE.fullmatch(name):
                key = its[1], NONE if its[2] is None else int(its[2])
                found.setdefault(key, {})[its[3]] = value
            elif its := _SOURCE.fullmatch(name):
                sources.append(int(its[1]))
        actions = [
            StageAction(kind, number, each["begin_s"], each["end_s"], each.get("wait_s", 0.0))
            for (kind, number), each in found.items()
            if "begin_s" in each and "end_s" in each
        ]
        in_order = sorted(actions, key=lambda each: (each.begin_s, each.end_s))
        rank, began_s, clock = (
            values.get(f"{PREFIX}{name}", 0.0) for name in ("rank", "began_s", "clock")
        )
        return cls(int(rank), sorted(sources), in_order, began_s, int(clock))


def _rounded(seconds: float) -> float:
    return round(seconds * _UNITS_PER_S) / _UNITS_PER_S
