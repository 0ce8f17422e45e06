"""The stages of a pipeline at work on the micro-batches of one step, and how long each is idle."""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.frame import box_sign
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.scales import duration, short
from stratagem.client.pictures.drawing.svg import label
from stratagem.client.pictures.picture import NumberTable, Picture, thinned

COLOURS = {
    "forward": "s1",
    "backward": "s2",
    "input": "s2",
    "weight": "s3",
    "exchange": "s4",
    "optimizer": "s6",
    "wait": "grid",
}
_TEXTS = {
    "exchange": "sums over micro-batches, stages and replicas",
    "optimizer": "step of the optimizer",
}
"""Of what is done once for all micro-batches."""


@dataclass(frozen=True, slots=True)
class Task:
    """A stage at work on one micro-batch."""

    lane: int
    """Which of the lanes: a stage, or those that one worker takes turns at."""
    start: float
    end: float
    kind: str
    """forward, backward, input or weight (the two halves of a backward pass), wait (for what the
    next piece of work needs); exchange or optimizer, once for all micro-batches."""
    micro_batch: int

    @property
    def computes(self) -> bool:
        """Return whether it is work on a micro-batch: what is no part of the bubble."""
        return self.kind != "wait" and self.kind not in _TEXTS

    @property
    def text(self) -> str:
        """Return what it is, in words."""
        if self.kind == "wait":
            return f"waits for what micro-batch {self.micro_batch} needs"
        return _TEXTS.get(self.kind, f"{self.kind} of micro-batch {self.micro_batch}")


def bubble(tasks: Sequence[Task], num_lanes: int) -> float:
    """Return the share of all lanes' time, from the first to the last work on a micro-batch, in
    which nothing is computed."""
    tasks = [task for task in tasks if task.computes]
    if not tasks:
        return 0.0
    span = max(task.end for task in tasks) - min(task.start for task in tasks)
    busy = sum(task.end - task.start for task in tasks)
    return 1 - busy / (num_lanes * span) if span > 0 else 0.0


def stages(
    names: Sequence[str],
    tasks: Sequence[Task],
    *,
    title: str,
    unit: str = "",
    idle: float | None = None,
    width: int = 720,
) -> Picture:
    """Return a lane for each name. unit: what times are counted in; unless given, seconds. idle:
    the bubble, where it is not that of these tasks."""
    idle = bubble(tasks, len(names)) if idle is None else idle
    bars = [
        Bar(
            *(task.lane, task.start, task.end, COLOURS[task.kind], task.text),
            inside=str(task.micro_batch) if task.computes else "",
        )
        for task in tasks
    ]
    kinds = [kind for kind in COLOURS if any(task.kind == kind for task in tasks)]
    signs = [(box_sign(COLOURS[kind], fill_opacity="0.82"), kind) for kind in kinds]
    signs.append((label(-4, 4, "◌", fill="muted"), f"bubble {idle:.0%}"))
    last = max((task.end for task in tasks), default=0.0)
    form = short if unit else duration
    content, height = lanes(names, bars, signs, width=width, end=last, form=form, unit=unit)
    rows = [
        (
            *(names[task.lane], task.kind, "" if task.kind in _TEXTS else str(task.micro_batch)),
            *(form(task.start), form(task.end)),
        )
        for task in sorted(tasks, key=lambda each: (each.lane, each.start))
    ]
    words = f"{len(names)} lanes, {len(tasks)} tasks; {idle:.0%} of the time is idle (bubble)"
    table = NumberTable(("stage", "what", "micro-batch", "from", "to"), thinned(rows))
    return Picture(title, words, width, height, content, table)
