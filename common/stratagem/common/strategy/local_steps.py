"""Training with few exchanges: replicas take local steps, and an outer optimizer joins what they
have learned (local SGD, https://arxiv.org/abs/1805.09767; DiLoCo,
https://arxiv.org/abs/2311.08105).

Each replica has parameters and an optimizer of its own. After every `local_steps` steps the mean
over the replicas of (common parameters - own parameters) is the gradient of the outer optimizer,
which updates the common parameters; all replicas continue from these. If the parameters are joined
in fragments, one after the other, while the replicas train on, this is Streaming DiLoCo
(https://arxiv.org/abs/2501.18512). The module computes from the settings what is due after a step.
It does not depend on how that is done.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias

from pydantic import Field

from stratagem.common.schema.document import DocumentValue, Positive, ZeroToBelowOne


class MeanOfReplicas(DocumentValue, tag="name", name="mean", is_extras=True):
    """The common parameters become the mean of the replicas': local SGD."""


class Nesterov(DocumentValue, tag="name", name="nesterov", is_extras=True):
    """SGD with Nesterov momentum: DiLoCo."""

    lr: Positive = 0.7
    momentum: ZeroToBelowOne = 0.9


OuterOptimizer: TypeAlias = MeanOfReplicas | Nesterov
OuterField: TypeAlias = Annotated[OuterOptimizer, Field(discriminator="name")]


DEFAULT_OUTER: Final = Nesterov()
"""The default outer optimizer, which joins replicas that take local steps."""
DEFAULT_MIX: Final = 0.5
"""The default share of its own parameters that a replica keeps when there is an overlap."""
DEFAULT_UPLOAD_EVERY: Final = 10
"""The default number of commits between uploads of state that only one worker holds."""


class OuterSchedule(Protocol):
    """The options that determine after which steps replicas with local steps are joined."""

    @property
    def local_steps(self) -> int | None: ...
    @property
    def fragments(self) -> int: ...
    @property
    def overlap_steps(self) -> int: ...


class Due(NamedTuple):
    """An action that is due for a fragment of the parameters: cut it (take its change since the
    last cut, to exchange it), or apply what was cut earlier."""

    fragment: int
    is_cut: bool


def fragments_of(sizes: Sequence[int], count: int) -> list[range]:
    """Return the parameter indices of each fragment: contiguous, of similar size, none empty."""
    total, start, firsts = max(1, sum(sizes)), 0, [0]
    for place, size in enumerate(sizes):
        by_size = (2 * start + size) * count // (2 * total)
        needed = count - (len(sizes) - place)  # as many parameters are left as fragments
        if place and len(firsts) < count and max(by_size, needed) >= len(firsts):
            firsts.append(place)
        start += size
    return [range(first, stop) for first, stop in pairwise([*firsts, len(sizes)])]


def due_after(step: int, schedule: OuterSchedule, num_steps: int) -> list[Due]:
    """Return the actions that are due after a step, in order.

    Fragment f of P is cut at (f + 1) * H / P in each round of H steps and applied `overlap_steps`
    later. After the last step of the run all pending fragments are applied, and then all are cut
    and applied at once.
    """
    assert schedule.local_steps is not None
    period, overlap = schedule.local_steps // schedule.fragments, schedule.overlap_steps
    newest_cut = step // period * period
    if newest_cut == step and overlap:
        newest_cut -= period
    is_last = step == num_steps
    due = []
    is_under_way = newest_cut > 0 and step - newest_cut <= overlap
    if overlap and is_under_way and (is_last or step - newest_cut == overlap):
        due.append(Due(_fragment_at(newest_cut, schedule), is_cut=False))
    cut = [_fragment_at(step, schedule)] if step % period == 0 else []
    for fragment in range(schedule.fragments) if is_last else cut:
        due.append(Due(fragment, is_cut=True))
        if is_last or not overlap:
            due.append(Due(fragment, is_cut=False))
    return due


def _fragment_at(step: int, schedule: OuterSchedule) -> int:
    """Return the index of the fragment whose change is taken for exchange (cut) after this step."""
    assert schedule.local_steps is not None
    return (step * schedule.fragments // schedule.local_steps - 1) % schedule.fragments
