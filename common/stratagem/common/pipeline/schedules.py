"""Pipeline schedules as data: for each rank the list of its actions, in order.

Sends and receives are not in the lists: a rank sends an activation as soon as it is computed and
waits for the inputs of an action before the action. Forward and backward numbers rise in every
list, so gradients are added in the same order under each of them. A list is checked by `simulation`
before it runs. Times in this file are in units of one forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from stratagem.common.base.errors import InvalidInputError, LimitError

# ---- Schedules ----


class TaskKind(StrEnum):
    """The kind of computation for one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The half of a backward pass for which other stages wait: the gradient of a stage's inputs."""
    WEIGHT = "W"
    """The second half of a backward pass: the gradient of the stage's parameters."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: TaskKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.stage}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""The ordered list of actions of each rank, as a tuple indexed by rank."""


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the GPipe schedule: all M forwards, then all backwards, with M activations kept."""
    _check(num_stages, num_micro_batches)
    return tuple(_pairs(stage, num_micro_batches, num_micro_batches) for stage in range(num_stages))


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the 1F1B schedule (arXiv:2006.09503): min(S − k − 1, M) warm-up forwards on stage k,
    then forward and backward in turn. Keeps min(S − k, M) activations."""
    _check(num_stages, num_micro_batches)
    return tuple(
        _pairs(stage, num_micro_batches, num_stages - stage - 1) for stage in range(num_stages)
    )


def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return 1F1B with twice the warm-up, so that a pair of forward and backward need not wait for
    a transfer between stages. Keeps min(2 (S − k − 1) + 1, M) activations."""
    _check(num_stages, num_micro_batches)
    return tuple(
        _pairs(stage, num_micro_batches, 2 * (num_stages - stage - 1))
        for stage in range(num_stages)
    )


def interleaved(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """Return the interleaved 1F1B schedule, arXiv:2104.04473; rank k owns the stages (chunks) k +
    v·S. M must be a multiple of S. One chunk is plain 1F1B, which has the smaller warm-up."""
    _check(num_ranks, num_micro_batches)
    if chunks < 1:
        raise InvalidInputError.at("chunks", f"{chunks} is not >= 1")
    if chunks == 1:
        return one_f_one_b(num_ranks, num_micro_batches)
    if num_micro_batches % num_ranks:
        raise InvalidInputError.at(
            "num_micro_batches",
            f"{num_micro_batches} is no multiple of the {num_ranks} ranks, as the interleaved "
            "schedule needs",
        )
    return tuple(
        _interleaved_rank(k, num_ranks, chunks, num_micro_batches) for k in range(num_ranks)
    )


def _interleaved_rank(
    rank: int, size: int, chunks: int, num_micro_batches: int
) -> tuple[Action, ...]:
    total = num_micro_batches * chunks

    def action(kind: TaskKind, step: int) -> Action:
        micro_batch = step // (size * chunks) * size + step % size
        chunk = step % (size * chunks) // size
        chunk = chunk if kind is TaskKind.FORWARD else chunks - 1 - chunk
        return Action(kind, rank + chunk * size, micro_batch)

    warmup = min(2 * (size - rank - 1) + (chunks - 1) * size, total)
    actions = [action(TaskKind.FORWARD, step) for step in range(warmup)]
    for step in range(total - warmup):
        actions += [action(TaskKind.FORWARD, warmup + step), action(TaskKind.BACKWARD, step)]
    actions += [action(TaskKind.BACKWARD, step) for step in range(total - warmup, total)]
    return tuple(actions)


def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return a zero-bubble schedule (arXiv:2401.10241, like ZB-H1): backwards are split in two, and
    weight gradients fill the bubbles. Keeps at most S activations on every rank."""
    _check(num_stages, num_micro_batches)
    return list_schedule(
        range(num_stages), num_micro_batches, max_live=num_stages, split_backward=True
    )


def list_schedule(
    rank_of: Sequence[int],
    num_micro_batches: int,
    *,
    max_live: int | None = None,
    split_backward: bool = False,
) -> Schedule:
    """Return a schedule for any placement of stages on ranks, in any number and order.

    The step is simulated with actions of equal length: a free rank does a backward if one is ready,
    else a forward if it keeps fewer than `max_live` activations, else a weight gradient. The
    default limit is that of 1F1B, per stage of the rank.
    """
    _check(len(rank_of), num_micro_batches)
    board = _Board(tuple(rank_of), num_micro_batches, max_live, split_backward)
    while board.num_left:
        board.tick()
    return tuple(tuple(actions) for actions in board.lists)


class _Board:
    """The state of the simulation in `list_schedule`: the actions that stages have done."""

    def __init__(
        self, rank_of: tuple[int, ...], num_micro_batches: int, max_live: int | None, split: bool
    ) -> None:
        self._rank_of, self._count, self._is_split = rank_of, num_micro_batches, split
        num_stages, num_ranks = len(rank_of), max(rank_of) + 1
        self._done = {kind: [0] * num_stages for kind in TaskKind}
        self._back = TaskKind.INPUT if split else TaskKind.BACKWARD
        self._release = TaskKind.WEIGHT if split else TaskKind.BACKWARD
        self._limit = [
            max_live if max_live is not None else num_stages - stage for stage in range(num_stages)
        ]
        self.lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.num_left = num_stages * num_micro_batches * (3 if split else 2)

    def tick(self) -> None:
        """Advance the simulation by one time unit: each rank does an action that is ready."""
        for action in [self._choose(rank) for rank in range(len(self.lists))]:
            if action is not None:
                self.lists[self._rank_of[action.stage]].append(action)
                self._done[action.kind][action.stage] += 1
                self.num_left -= 1

    def _choose(self, rank: int) -> Action | None:
        stages = [stage for stage, owner in enumerate(self._rank_of) if owner == rank]
        for kind in (self._back, TaskKind.FORWARD, TaskKind.WEIGHT):
            ready = [(self._done[kind][s], -s) for s in stages if self._is_ready(kind, s)]
            if ready:
                micro_batch, stage = min(ready)
                return Action(kind, -stage, micro_batch)
        return None

    def _is_ready(self, kind: TaskKind, stage: int) -> bool:
        done = self._done
        number = done[kind][stage]
        if number == self._count:
            return False
        if kind is TaskKind.FORWARD:
            live = number - done[self._release][stage]
            return live < self._limit[stage] and (stage == 0 or done[kind][stage - 1] > number)
        if kind is TaskKind.WEIGHT:
            return self._is_split and done[TaskKind.INPUT][stage] > number
        last = stage == len(self._rank_of) - 1
        return done[TaskKind.FORWARD][stage] > number and (last or done[kind][stage + 1] > number)


def choose(name: str, rank_of: Sequence[int], num_micro_batches: int) -> Schedule:
    """Return the schedule of this name (a key of `SCHEDULES`) for stages placed on ranks.

    If it does not fit the placement, or the number of micro-batches of a short last batch, a list
    schedule is returned instead: the order of work changes, the result does not.
    """
    if name not in SCHEDULES:
        raise InvalidInputError.at("schedule", f"{name!r} is not one of {', '.join(SCHEDULES)}")
    num_ranks, num_stages = max(rank_of) + 1, len(rank_of)
    is_split = name == "zero_bubble"
    looped = all(rank_of[i] == rank_of[i % num_ranks] for i in range(num_stages))
    if not looped or num_stages % num_ranks or len(set(rank_of)) != num_ranks:
        return list_schedule(rank_of, num_micro_batches, split_backward=is_split)
    chunks = num_stages // num_ranks
    if chunks > 1:
        if is_split or num_micro_batches % num_ranks:
            return list_schedule(rank_of, num_micro_batches, split_backward=is_split)
        lists = interleaved(num_ranks, chunks, num_micro_batches)
    else:
        lists = SCHEDULES[name](num_ranks, num_micro_batches)
    place = {rank_of[k]: k for k in range(num_ranks)}
    return tuple(lists[place[rank]] for rank in range(num_ranks))


SCHEDULES: Final[Mapping[str, Callable[[int, int], Schedule]]] = {
    "1f1b": one_f_one_b,
    "eager": eager_one_f_one_b,
    "gpipe": gpipe,
    "zero_bubble": zero_bubble,
}
"""Schedule functions keyed by name, for one stage per rank: (num_stages, num_micro_batches) ->
Schedule. With several stages per rank, all names but zero_bubble mean the interleaved one."""


EAGER_FROM: Final = 0.005
"""The duration of a hop, as a share of a stage's computation for a micro-batch, from which `suited`
returns eager.

A hop is measured between idle ranks, which is its least cost: during computation it takes two to
three times as long, and may wait. Where two ranks measured 0.9 %, 1F1B took 5 % longer than eager.
"""


def suited(hop_s: float, compute_s: float) -> str:
    """Return the name of the schedule that "auto" stands for. hop_s: the time of one transfer
    between two stages. compute_s: the time of forward and backward of one micro-batch on one stage,
    mean over stages.

    Under 1F1B with equal stages each pair of forward and backward waits for one hop, so a step
    takes up to hop_s / compute_s longer; under eager no pair waits, at the price of almost twice
    the activations. Up to the share `EAGER_FROM` memory is worth more.
    """
    return "eager" if hop_s > EAGER_FROM * compute_s else "1f1b"


def has_eager(rank_of: Sequence[int]) -> bool:
    """Return whether the schedules 1f1b and eager differ: each of several ranks has one stage."""
    return len(set(rank_of)) == len(rank_of) > 1


def forward_only(rank_of: Sequence[int], num_micro_batches: int) -> Schedule:
    """Return the schedule of an evaluation: each rank runs its stages on all micro-batches in
    order."""
    num_ranks = max(rank_of) + 1
    return tuple(
        tuple(
            Action(TaskKind.FORWARD, stage, micro_batch)
            for micro_batch in range(num_micro_batches)
            for stage, owner in enumerate(rank_of)
            if owner == rank
        )
        for rank in range(num_ranks)
    )


def _pairs(stage: int, count: int, warmup: int) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forwards and backwards in turn, then remaining backwards."""
    warmup = min(warmup, count)
    actions = [Action(TaskKind.FORWARD, stage, m) for m in range(warmup)]
    for m in range(count - warmup):
        actions += [
            Action(TaskKind.FORWARD, stage, warmup + m),
            Action(TaskKind.BACKWARD, stage, m),
        ]
    actions += [Action(TaskKind.BACKWARD, stage, m) for m in range(count - warmup, count)]
    return tuple(actions)


def _check(num_stages: int, num_micro_batches: int) -> None:
    for name, value in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
        if value < 1:
            raise InvalidInputError.at(name, f"{value} is not >= 1")


# ---- Transfer tags ----
#
# The tag of an activation transfer is base + 2·micro-batch (+ 1 for a gradient), a uint32.
#
# The base is a function of the boundary between two stages and is computed alike by both ends.
# Every (boundary, micro-batch, direction) therefore has a different tag, also when two boundaries
# join the same pair of workers. Numbers above those of all boundaries are for messages that are
# sent once per step.

MAX_TAG: Final = 2**32 - 1
_MAX_WORD: Final = 2**64 - 1


def base_of(boundary: int, num_micro_batches: int) -> int:
    """Return the first message tag of a stage boundary, boundary · 2 · M; raise below 0."""
    _not_negative("boundary", boundary)
    _not_negative("num_micro_batches", num_micro_batches)
    return boundary * 2 * num_micro_batches


def tag_of(base: int, micro_batch: int, *, backward: bool) -> int:
    """Return the message tag of a micro-batch's transfer over a boundary. Raises LimitError for a
    number that is too large, and InvalidInputError for a negative number, whose tag would be that
    of another transfer."""
    _not_negative("base", base)
    _not_negative("micro_batch", micro_batch)
    direction = "backward" if backward else "forward"
    offset = 2 * micro_batch + int(backward)
    if offset > _MAX_WORD:
        raise LimitError(
            f"tag: {direction} offset of micro-batch {micro_batch} is beyond a 64-bit word"
        )
    if offset > MAX_TAG:
        raise LimitError(f"tag: {direction} offset of micro-batch {micro_batch} is beyond 32 bits")
    if base + offset > MAX_TAG:
        raise LimitError(
            f"tag: base {base} + {direction} offset of micro-batch {micro_batch} is beyond 32 bits"
        )
    return base + offset


def control_tag(num_boundaries: int, num_micro_batches: int, number: int) -> int:
    """Return the tag of the control message with this number; each is sent once per step."""
    _not_negative("number", number)
    tag = base_of(num_boundaries, num_micro_batches) + number
    if tag > MAX_TAG:
        raise LimitError(
            f"tag: {num_boundaries} boundaries of {num_micro_batches} micro-batches leave no "
            "number below 2^32 for the step itself"
        )
    return tag


def _not_negative(name: str, value: int) -> None:
    if value < 0:
        raise InvalidInputError.at(f"tag.{name}", f"{value} is below 0")
