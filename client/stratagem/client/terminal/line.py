"""Show a run on a line as wide as the terminal, redraw it, and select events for lines above."""

import io
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from stratagem.client.course.client_sums import ClientState
from stratagem.client.course.members import failure_text
from stratagem.client.course.views import ENDS, Event, Phase, Progress, is_of_verifier
from stratagem.client.terminal.followed import FollowedRun, evaluations_in
from stratagem.client.terminal.tables import bar_text, duration_text, few, more_text, number_text
from stratagem.common.base.text import printable, range_of, values_text, without_spreads

# ---- Line ----
#
# The line is a pure function. Fields are left out from the right until the line fits; name, bar,
# count, loss and the time left stay longest.

SEPARATOR: Final = "  "
MAX_BAR_CELLS: Final = 12
MIN_BAR_CELLS: Final = 4
MIN_NAME_CELLS: Final = 6
QUIET_PHASES: Final = ("", "TRAINING")
"""The phases of a strategy that the line does not name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the status line."""

    text: str
    stays: bool = False
    """The field is among the last to be dropped if the line is too long."""
    style: str = ""


def live_line(run: FollowedRun, width: int) -> Text:
    """Return the status line of a run with a progress bar, at most `width` character cells wide."""
    title = printable(run.name or run.run_id, is_line=True)
    fields = [Field(title, stays=True, style="bold"), *_fields(run)]
    done = fraction(run)
    if done is None or not _is_counting(run):
        return _joined(_fitted(fields, width), width)
    percent = f" {_percent(done):>4}"
    # The name is shortened before the bar; both make room for the count.
    for cells, name_cells in (
        (MAX_BAR_CELLS, None),
        (MIN_BAR_CELLS, None),
        (MIN_BAR_CELLS, MIN_NAME_CELLS),
        (0, MIN_NAME_CELLS),
    ):
        bar = Field(f"{bar_text(done, cells)}{percent}".strip(), stays=True, style="cyan")
        name = Field(_shortened(fields[0].text, name_cells), stays=True, style="bold")
        fitted = _fitted([name, bar, *fields[1:]], width)
        if _cells(fitted) <= width:
            return _joined(fitted, width)
    while len(fitted) > 2 and _cells(fitted) > width:
        fitted = fitted[:-1]
    return _joined(fitted if _cells(fitted) <= width else fitted[1:], width)


def plain_line(run: FollowedRun) -> str:
    """Return the full status line of a run with its id, for outputs that are not a terminal."""
    done = fraction(run) if _is_counting(run) else None
    parts = [run.run_id, "" if done is None else _percent(done)]
    return SEPARATOR.join([*filter(None, parts), *(field.text for field in _fields(run))])


def fraction(run: FollowedRun) -> float | None:
    """Return the progress of the run, from 0 to 1; None if it is unknown."""
    if run.is_federated or run.is_population:
        done, amount = run.segment, run.num_segments
    elif run.num_steps:
        done, amount = run.step, run.num_steps
    else:
        done, amount = run.segment, run.num_segments
    return min(done / amount, 1.0) if amount else None


def count_text(run: FollowedRun) -> str:
    """Format the progress of a run: "round 7/30", "generation 5/20" or "step 143/212"."""
    if run.is_federated:
        return _of("round", run.rounds.number or run.segment, run.num_segments)
    if run.is_population:
        return _of("generation", run.generations.num_closed or run.segment, run.num_segments)
    if run.num_steps or run.step:
        return _of("step", run.step, run.num_steps)
    return _of("segment", run.segment, run.num_segments)


def epoch_text(latest: Progress | None) -> str:
    """Format the current epoch, as "epoch 4/5"; "" if it is unknown."""
    if latest is None or latest.epoch <= 0 or not latest.step:
        return ""
    total = latest.epoch * latest.num_steps / latest.step
    return f"epoch {_passes(latest.epoch)}/{_passes(total)}"


def clients_text(run: FollowedRun) -> str:
    """Format the outcomes of the round's clients: "31 of 40 done, 2 late, 1 rejected"."""
    newest = run.rounds.newest
    clients = [client for client in newest.clients if not client.staleness] if newest else []
    if not newest or not clients:
        return ""
    num_by_state = Counter(client.state for client in clients)
    late = num_by_state[ClientState.LATE]
    if run.latest is not None and newest.is_open:  # those of earlier rounds, which still train
        late = run.latest.num_clients_late
    num_excused = num_by_state[ClientState.EXCUSED]
    parts = [f"{num_by_state[ClientState.DONE]} of {len(clients) - num_excused} done"]
    num_rejected = num_by_state[ClientState.REJECTED]
    for number, word in ((late, "late"), (num_rejected, "rejected"), (num_excused, "excused")):
        if number:
            parts.append(f"{number} {word}")
    return ", ".join(parts)


def best_text(run: FollowedRun) -> str:
    """Format the score of a population's best member: "best 0.94 (member 3)"; "" if unknown."""
    generations = run.generations
    if generations.best_member is None:
        return ""
    score = "invalid" if generations.best is None else number_text(generations.best)
    return f"best {score} (member {generations.best_member})"


def loss_of(run: FollowedRun) -> float | None:
    """Return the newest loss to show for the run; None for a population or a private federation.

    A federation's is that of its newest round, or of the round before if an open round has none.
    """
    if run.is_population or run.is_private:
        return None
    if not run.is_federated:
        return run.loss
    newest = run.rounds.newest
    if newest is None:
        return None
    if newest.loss_so_far is not None or not newest.is_open:
        return newest.loss_so_far
    closed = (round_.loss_so_far for round_ in reversed(run.rounds.rounds) if not round_.is_open)
    return next(closed, None)


def evaluation_texts(run: FollowedRun, among: Container[str] | None = None) -> list[str]:
    """Format the metrics of the newest evaluation, the one that decides the best state first: at
    most MAX_METRICS, then the number of the others.

    among: the metrics to choose from, by default all.
    """
    metrics = without_spreads(run.metrics)
    names = sorted(metrics, key=lambda name: (name != run.scored_by, name))
    names = [name for name in names if among is None or name in among]
    texts = []
    for name in few(names):
        ends = range_of(run.metrics, name)
        over = "" if ends is None else f" ({number_text(ends[0])} to {number_text(ends[1])})"
        texts.append(f"{name} {number_text(metrics[name])}{over}")
    return [*texts, more_text(names)] if more_text(names) else texts


def _is_counting(run: FollowedRun) -> bool:
    return run.phase is Phase.RUNNING and not run.is_waiting and run.has_begun


def _fields(run: FollowedRun) -> Iterator[Field]:
    if not _is_counting(run):
        yield Field(run.phase, stays=True)
        if run.sentence:
            yield Field(printable(run.sentence, is_line=True), stays=True)
        return
    if epoch := epoch_text(run.latest):
        yield Field(epoch)
    yield Field(count_text(run), stays=True)
    if run.is_federated and (clients := clients_text(run)):
        yield Field(clients)
    if run.is_population:
        yield from _of_population(run)
    latest = run.latest
    yield from map(Field, _phases(run))
    loss = loss_of(run)
    if loss is not None:
        yield Field(f"loss {number_text(loss)}", stays=True)
    if latest is not None:
        yield from _of_speed(latest)
        yield from _of_time(latest)
    if not run.is_population:  # the members' scores are shown already
        yield from (Field(printable(text, is_line=True)) for text in evaluation_texts(run))
    of_step = {} if latest is None else latest.metrics
    for name in few(sorted(of_step)):
        yield Field(printable(f"{name} {number_text(of_step[name])}", is_line=True))
    if more := more_text(sorted(of_step)):
        yield Field(more)


def _phases(run: FollowedRun) -> Iterator[str]:
    """Yield the current phases of the strategy and of phase training, except the usual ones."""
    latest, newest = run.latest, run.rounds.newest
    if latest is None or (newest is not None and newest.is_open and latest.segment < run.segment):
        return  # it belongs to the previous round
    for phase in (latest.strategy_phase, latest.training_phase):
        if phase not in QUIET_PHASES:
            yield phase.lower()


def _of_speed(latest: Progress) -> Iterator[Field]:
    if latest.lr:
        yield Field(f"lr {latest.lr:.3g}")
    if latest.rows_per_s:
        yield Field(f"{latest.rows_per_s:,.0f} rows/s")
    if latest.bubble is not None:
        yield Field(f"bubble {latest.bubble:.0%}")
    if latest.num_skipped_steps:
        yield Field(f"{latest.num_skipped_steps} steps skipped", style="yellow")


def _of_time(latest: Progress) -> Iterator[Field]:
    if latest.eta_s is not None:
        at_most = "at most " if latest.may_end_early else ""
        yield Field(f"{at_most}{duration_text(latest.eta_s)} left", stays=True)


def _of_population(run: FollowedRun) -> Iterator[Field]:
    if best := best_text(run):
        yield Field(best, stays=True)
    if run.generations.num_copied:
        yield Field(f"{run.generations.num_copied} copied")
    if run.generations.scored:
        yield Field(f"{len(run.generations.scored)} of {run.num_members} members trained")


def _percent(done: float) -> str:
    """Format a fraction in percent, rounded down, so that only a complete run is at "100%"."""
    return f"{math.floor(round(done * 100, 6))}%"  # a product may be a last bit too small


def _passes(epochs: float) -> int:
    return math.ceil(round(epochs, 6))  # a quotient may be a last bit too large


def _of(word: str, number: int, amount: int) -> str:
    return f"{word} {number}/{amount}" if amount else f"{word} {number}"


def _fitted(fields: Sequence[Field], width: int) -> list[Field]:
    """Drop optional fields, from the right, until the rest fits; return the remaining fields."""
    fitting = list(fields)
    for field in reversed(fields):
        if _cells(fitting) <= width:
            break
        if not field.stays:
            fitting.remove(field)
    return fitting


def _cells(fields: Sequence[Field]) -> int:
    return cell_len(SEPARATOR.join(field.text for field in fields))


def _shortened(text: str, cells: int | None) -> str:
    if cells is None or cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…"


def _joined(fields: Sequence[Field], width: int) -> Text:
    line = Text(SEPARATOR).join(Text(field.text, style=field.style) for field in fields)
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


# ---- Redrawing ----
#
# The line stays at the bottom of a terminal and is drawn again and again, with other output above
# it. A terminal that becomes narrower folds the present line into several; all of them are
# erased, as many as the drawn cells need at the new width.

INTERVAL_S: Final = 0.1
"""The shortest time between two redraws, and between two checks of the terminal's width."""


class RedrawnLine:
    """Context manager that keeps `line(width)` at the bottom of a terminal; thread-safe.

    Text that is written to stderr meanwhile appears above the line, if stderr is a terminal.
    """

    def __init__(self, console: Console, line: Callable[[int], Text]) -> None:
        self._console, self._line = console, line
        self._lock = threading.RLock()
        self._is_stale = True
        self._cells = self._width = 0
        """The width, in character cells, of the line that is on the screen."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="line", daemon=True)
        self._stderr = sys.stderr

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager for changes of what the line shows; the line is redrawn soon after."""
        with self._lock:
            yield
            self._is_stale = True

    def say(self, text: Text) -> None:
        """Print a text above the line."""
        with self._lock, self._console:
            self._erase()
            self._console.print(text, soft_wrap=True)
            self._draw()

    def erase(self) -> None:
        """Erase the line."""
        with self._lock, self._console:
            self._erase()

    def __enter__(self) -> Self:
        if self._stderr.isatty():
            sys.stderr = _Above(self)
        self.redraw()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if isinstance(sys.stderr, _Above):
            sys.stderr.flush()
            sys.stderr = self._stderr
        self.erase()

    def _keep_drawing(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self._is_stale or self._console.width != self._width:
                self.redraw()

    def redraw(self) -> None:
        """Replace the line on the screen by the current one."""
        with self._lock, self._console:
            self._erase()
            self._draw()

    def _draw(self) -> None:
        self._is_stale, self._width = False, self._console.width
        # A line of the full width would leave the cursor where terminals differ.
        line = self._line(self._width - 1)
        self._console.print(line, end="", soft_wrap=True)
        self._cells = line.cell_len

    def _erase(self) -> None:
        num_lines = max(1, -(-self._cells // self._console.width))
        whole_line = (ControlType.ERASE_IN_LINE, 2)
        above = [(ControlType.CURSOR_UP, 1), whole_line] * (num_lines - 1)
        self._console.control(Control(ControlType.CARRIAGE_RETURN, whole_line, *above))
        self._cells = 0


class _Above(io.TextIOBase):
    """A replacement of stderr that prints lines above the redrawn line."""

    def __init__(self, line: RedrawnLine) -> None:
        self._line, self._rest = line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line.say(Text(line))
        return len(text)

    def flush(self) -> None:
        """Print the text after the last newline."""
        rest, self._rest = self._rest, ""
        if rest:
            self._line.say(Text(rest))

    def isatty(self) -> bool:
        return True


# ---- Milestones ----
#
# A milestone is an item of a run that is worth a line of its own. There is one line per segment,
# round, generation and phase, and failures are always shown. The functions are pure.

TROUBLE: Final = {
    **dict.fromkeys(("BuildFailed", "PartyFailed", "ProcessDied", "RoundWaits"), ""),
    "SegmentRefuted": "REFUTED",
}
"""The kinds of events that are printed at once, with the word before; "": the run's phase."""
ONCE: Final = frozenset({"RunSubmitted", "RunResumed", "ModelBuilt", "Noted"})
"""The kinds of events about the whole run for which the event's sentence is printed."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A line to print about an event."""

    text: str
    is_urgent: bool = False
    """The line is printed at once, even where output is limited to one line per interval."""


def milestone(before: Phase, run: FollowedRun, item: Event | Progress) -> Milestone | None:
    """Return the line to print for an item (event or progress), or None if it is worth none.
    before: the run's phase before the item; run: the run after it."""
    if not isinstance(item, Event) or is_of_verifier(item):
        return None
    if item.kind in ENDS:
        text = item.sentence if item.phase is Phase.COMPLETED else _reached(run, item)
        return Milestone(SEPARATOR.join(filter(None, (item.phase, text))), is_urgent=True)
    recovers = item.phase is not before and Phase.RECOVERING in (item.phase, before)
    if item.kind in TROUBLE or recovers:
        word = TROUBLE.get(item.kind) or item.phase
        return Milestone(f"{word}{SEPARATOR}{item.sentence}", is_urgent=True)
    if item.payload.get("party"):
        return None
    match item.kind:
        case "SegmentFinished":
            return _line(_segment(run, item))
        case "RoundClosed":
            return _line(_round(run))
        case "GenerationClosed":
            return _line(_generation(run, item))
        case "Evaluated" if not run.is_federated:  # a round's is in the next line
            return Milestone(item.sentence)
        case "MembersFormed":
            is_first = item.payload.get("membership") == 1
            return Milestone(item.sentence, is_urgent=not is_first)
        case kind if kind in ONCE or (item.phase is not before and not item.phase.is_final):
            of_note = ("warning", "conversion", "from_segment")
            is_unusual = any(item.payload.get(key) not in (None, "") for key in of_note)
            return Milestone(item.sentence, is_urgent=is_unusual)
        case _:
            return None


def _reached(run: FollowedRun, end: Event) -> str:
    """Return a text on how far a run got that ended early."""
    counts_steps = not (run.is_federated or run.is_population)
    if end.kind == "RunFailed" and run.has_begun and counts_steps:
        activity = (end.payload.get("error") or {}).get("activity") or ""
        return failure_text(run.committed, activity, run.step, run.num_steps)
    return f"at {count_text(run)}" if run.has_begun else ""


def _line(parts: Iterator[str]) -> Milestone:
    return Milestone(SEPARATOR.join(part for part in parts if part))


def _segment(run: FollowedRun, event: Event) -> Iterator[str]:
    segment, of = event.payload["segment"], f"/{run.num_segments}" if run.num_segments else ""
    yield f"segment {segment}{of}"
    if run.step:
        yield count_text(run)
    if run.mean_loss is not None:
        yield f"mean loss {number_text(run.mean_loss)}"
    yield from evaluation_texts(run, evaluations_in(event.payload))
    seconds, num_rows = event.payload.get("seconds"), event.payload.get("num_rows")
    if seconds and num_rows and run.step:
        yield f"{num_rows / seconds:,.0f} rows/s"
    if again := event.payload.get("num_redone_steps"):
        yield f"{again} steps done again"


def _round(run: FollowedRun) -> Iterator[str]:
    yield count_text(run)
    yield clients_text(run)
    loss = loss_of(run)
    yield "" if loss is None else f"loss {number_text(loss)}"
    if run.has_news:
        texts = evaluation_texts(run)
        yield from texts[:-1]
        yield f"{texts[-1]} (after round {run.evaluated})"


def _generation(run: FollowedRun, event: Event) -> Iterator[str]:
    yield count_text(run)
    yield best_text(run)
    yield values_text(event.payload.get("params") or {})
    copied = run.generations.num_copied
    yield f"{copied} copied" if copied else ""
