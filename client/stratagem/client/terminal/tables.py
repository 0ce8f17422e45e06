"""Format runs and workers as text for people and as JSON for programs.

The module has all wording about a status, and depends on neither calls nor exit codes.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.client.course.members import progress_text, worker_state
from stratagem.client.course.views import (
    Commit,
    Hyperparameters,
    Phase,
    Progress,
    RefusedWorker,
    RunStatus,
    Worker,
)
from stratagem.common.base.text import counted, printable, range_of, values_text, without_spreads
from stratagem.common.observe.findings import Finding, Level

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# ---- Tables ----

LEVEL_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
COLOURS: Final[Mapping[str, str]] = {
    Phase.COMPLETED: "green",
    Phase.FAILED: "red",
    Phase.CANCELLED: "yellow",
    Phase.RECOVERING: "magenta",
}


SIDE_METRICS: Final = frozenset((
    *("train.grad_norm", "train.max_grad_norm"),
    *("train.loss_min", "train.loss_max", "train.loss_std"),
))  # fmt: skip
"""Metrics that lists of states leave out; the run shows the newest values, and JSON has all."""
_LOSS: Final = "train.loss"
_FINDING_CELLS: Final = (len("evaluation"), len("execution.precision"), len("warn"))
"""The least column widths of a table of findings, which is printed row by row."""
_BITS_OF_THREADS: Final = "runs with other numbers of threads have other bits"
LABEL_CELLS: Final = 10
MAX_CHANGES: Final = 8
"""The largest number of hyperparameter changes to show per member; JSON has all."""


def to_json(value: "DataclassInstance", **extra: Any) -> str:
    """Encode a value as one line of standard JSON; a number that is not finite becomes a string."""
    return json.dumps({**extra, **_plain(dataclasses.asdict(value))}, allow_nan=False)


def many_to_json(values: "Iterable[DataclassInstance]") -> str:
    return json.dumps([_plain(dataclasses.asdict(value)) for value in values], allow_nan=False)


def _plain(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def metrics_text(metrics: Mapping[str, float], first: str = "", *, in_short: bool = False) -> str:
    """Format metrics as "train.loss 0.0312 test.accuracy 0.9722 (0.91 to 0.99)": the training loss
    first, and in parentheses the range over a federation's clients.

    first: the metric to put next. in_short: show only a few metrics, and the number of the others.
    """
    means = without_spreads(metrics)
    names = sorted(means, key=lambda name: (name != _LOSS, name != first, name))
    parts = []
    for name in few(names) if in_short else names:
        ends = range_of(metrics, name)
        over = "" if ends is None else f" ({ends[0]:.4g} to {ends[1]:.4g})"
        parts.append(f"{name} {means[name]:.4g}{over}")
    more = more_text(names) if in_short else ""
    return "  ".join(filter(None, (*parts, more)))


def amount_text(status: RunStatus) -> str:
    """Format the run's progress: "round 3/40", "generation 2/5" or "step 120/600"."""
    if status.strategy.startswith("Federated"):
        return f"round {status.segment}/{status.num_segments}"
    if is_population(status.strategy):
        return generation_text(status)
    return f"step {status.step}/{status.num_steps}" if status.num_steps else f"step {status.step}"


def _reached(status: RunStatus) -> str:
    """Format the progress of a run; of a failed run, its last commit and the failed step."""
    if status.phase is Phase.FAILED:
        return progress_text(status)
    return amount_text(status)


def is_population(strategy: str) -> bool:
    """Return whether the short name of a strategy is that of a population."""
    return strategy.startswith("PopulationBased")


def generation_text(amounts: RunStatus | Progress) -> str:
    """Format the number of committed generations of a population: "generation 2/5"."""
    return f"generation {amounts.segment}/{amounts.num_segments}"


def print_status(console: Console, status: RunStatus, threads: int | None = None) -> None:
    """Print all about one run. threads: the number of threads per worker, if known."""
    rows = [
        ("run", f"{status.run_id} ({status.name})"),
        ("phase", _phase_text(status)),
        ("reason", status.reason),
        ("strategy", status.strategy),
        ("engine", _engine_text(status)),
        ("progress", _reached(status)),
        ("metrics", metrics_text(status.metrics)),
        *_population_rows(status),
        ("best", _no_best_text(status)),
        ("checked", status.verification),
        ("workers", ", ".join(status.worker_ids)),
        ("threads", f"{threads} of each worker; {_BITS_OF_THREADS}" if threads else ""),
        ("submitted", _submitted_text(status)),
        ("verified", str(status.last_verification or "")),
        ("kept", "until it is unpinned" if status.pinned else ""),
        ("seconds", "" if status.seconds is None else f"{status.seconds:.1f}"),
        ("result", "" if status.reproducible else "replayable from its journal, not reproducible"),
    ]
    for name, value in rows:
        if value:
            _print_row(console, name, value)
    if status.error is not None:
        console.print(Text(status.error.traceback.rstrip(), style="red"))
    if status.commits:
        console.print(_commits_table(status, with_states=not console.is_terminal))
    for commit in status.commits if console.is_terminal else ():
        label = Text(f"{f'state {commit.segment}':<{LABEL_CELLS}}", style="bold")
        # A path must be copied whole, so its line is not folded.
        console.print(label.append(_state_text(commit), ""), soft_wrap=True)


def _print_row(console: Console, name: str, value: str) -> None:
    """Print a name and a value; on a terminal, further lines are aligned with the value."""
    if not console.is_terminal:
        console.print(Text(f"{name:<{LABEL_CELLS}}{value}"))
        return
    row = Table.grid()
    row.add_column(width=LABEL_CELLS, style="bold")
    row.add_column(overflow="fold")
    row.add_row(Text(name), Text(value))
    console.print(row)


def print_runs(console: Console, runs: Sequence[RunStatus]) -> None:
    """Print one line per run, cut to the terminal's width."""
    if not runs:
        console.print("no runs")
        return
    names = ["run", "phase", "strategy", "progress", "metrics", "submitted", "reason"]
    rows = [names, *map(_run_cells, runs)]
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        line = Text(style="bold" if row is names else "")
        for cell, width in zip(row, widths, strict=True):
            line.append(cell, COLOURS.get(cell, "")).append(" " * (width - cell_len(cell) + 2))
        line.rstrip()
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)


def _run_cells(run: RunStatus) -> list[str]:
    """Return the cells of a run's row in the list of runs."""
    cells = (
        *(run.run_id, run.phase, run.strategy, _reached(run), _chief_metrics_text(run)),
        *(_time_text(run.submitted_at_s), run.reason),
    )
    return [printable(cell, is_line=True) for cell in cells]


def _chief_metrics_text(run: RunStatus) -> str:
    """Format the metric that decides the best state, or else the first evaluation metric, and the
    training loss."""
    evaluation = run.job.get("evaluation") or {}
    first = next(iter(evaluation.get("metrics") or ()), "loss")
    names = (f"{evaluation.get('split')}.{evaluation.get('best') or first}", "train.loss")
    return metrics_text({n: v for n, v in run.metrics.items() if n in names})


def _chief_metric(run: RunStatus) -> str:
    """Return the name of the metric that decides which state is the best one."""
    evaluation = run.job.get("evaluation") or {}
    return f"{evaluation.get('split')}.{evaluation.get('best')}"


def print_workers(
    console: Console, workers: Iterable[Worker], refused: Iterable[RefusedWorker] = ()
) -> None:
    names = ("worker", "state", "address", "device", "threads", "data plane", "tags", "runs")
    table = _table(*names, "reason")
    for worker in workers:
        cells = (
            *(worker.worker_id, worker_state(worker), worker.address or "tunnel"),
            *(f"{worker.device} ({worker.device_name})", str(worker.num_threads)),
            *(worker.data_plane, ", ".join(worker.tags), ", ".join(worker.run_ids)),
            worker.quarantine or worker.reason,
        )
        table.add_row(*map(Text, cells))
    for caller in refused:
        reason = f"{caller.reason} (asked {counted(caller.num_times, 'time')})"
        table.add_row(*map(Text, (caller.worker_id, "refused", caller.address, *[""] * 5, reason)))
    console.print(table if table.row_count else "no workers")


def _phase_text(status: RunStatus) -> str:
    if status.strategy_phase and not status.phase.is_final:
        return f"{status.phase} ({status.strategy_phase})"
    return status.phase


def _no_best_text(status: RunStatus) -> str:
    """Return why a completed run has no best state although its job asks for one; else ""."""
    is_wanted = (status.job.get("evaluation") or {}).get("best") is not None
    if not is_wanted or status.phase is not Phase.COMPLETED or status.commit("best") is not None:
        return ""
    return f"no state: {_chief_metric(status)} has no value for any (`stratagem watch` shows why)"


def _population_rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield rows (name, text) with the hyperparameters of a population's best state, and of the
    final one if it differs."""
    best, final = status.commit("best"), status.commit()
    metric = _chief_metric(status)
    for name, commit in (("best", best), ("final" if status.phase.is_final else "newest", final)):
        if commit is not None and commit.member is not None and (name == "best" or commit != best):
            values = values_text(commit.hyperparameters)
            score = commit.metrics.get(metric)
            score_text = "" if score is None else f", score {score:.4g}"
            yield name, f"segment {commit.segment}, member {commit.member}: {values}{score_text}"
            if len(commit.schedule) > 1:
                yield "", _schedule_text(commit.schedule)


def _schedule_text(schedule: Sequence[Hyperparameters]) -> str:
    """Format the changes of hyperparameters: "lr 0.1 from step 0; lr 0.11 from step 5"."""
    parts, previous = [], dict[str, Any]()
    for setting in schedule:
        changed = {n: v for n, v in setting.values.items() if n not in previous or previous[n] != v}
        parts.append(f"{values_text(changed) or 'the same'} from step {setting.from_step}")
        previous = dict(setting.values)
    num_earlier = len(parts) - MAX_CHANGES
    return "; ".join([f"{num_earlier} earlier", *parts[num_earlier:]] if num_earlier > 0 else parts)


def _submitted_text(status: RunStatus) -> str:
    when = _time_text(status.submitted_at_s)
    return f"{when} by {status.submitted_by}" if status.submitted_by else when


def _engine_text(status: RunStatus) -> str:
    """Format the engine that exchanges tensors and, while there are workers, its encryption."""
    plane = f"data plane {status.data_plane}" if status.data_plane else ""
    return ", ".join(word for word in (status.engine, plane) if word)


def _commits_table(status: RunStatus, *, with_states: bool) -> Table:
    names = ("segment", "step", "kind", "metrics")
    table = _table(*names, "state") if with_states else _table(*names)
    for commit in status.commits:
        kinds = [
            name for name, is_so in (("best", commit.is_best), ("final", commit.is_final)) if is_so
        ]
        where = [_state_text(commit)] if with_states else []
        measured = {n: v for n, v in commit.metrics.items() if n not in SIDE_METRICS}
        chief = _chief_metric(status)
        metrics = metrics_text(measured, chief, in_short=True)
        metrics = metrics or _measured_elsewhere(status, commit)
        table.add_row(str(commit.segment), str(commit.step), ", ".join(kinds), metrics, *where)
    return table


def _state_text(commit: Commit) -> str:
    return _path_text(commit.path) or f"sha256:{commit.digest[:16]}"


def _measured_elsewhere(status: RunStatus, commit: Commit) -> str:
    """Return a remark if a commit's metrics come from the run that this one resumed, else ""."""
    begins_from = status.job.get("initial") or {}
    is_resumed = begins_from.get("resume") and commit.digest == begins_from.get("digest")
    return "measured by the run that it resumed" if is_resumed else ""


def _path_text(path: str) -> str:
    """Return a path relative to the current folder if it is below that, otherwise unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S") if time_s else ""


def print_finding(console: Console, finding: Finding, *, is_first: bool) -> None:
    """Print a finding as the next row of a growing table. is_first: print the headings before."""
    names = ("check", "of", "", "found, and what to do")
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in _FINDING_CELLS:
        table.add_column(min_width=width, overflow="fold")
    table.add_column(overflow="fold")
    if is_first:
        table.add_row(*(Text(name, style="bold") for name in names))
    table.add_row(*_finding_cells(finding))
    console.print(table)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the table of findings."""
    table = Table("check", "of", "", "found, and what to do", box=box.SIMPLE)
    for finding in findings:
        table.add_row(*_finding_cells(finding))
    return table


def _finding_cells(finding: Finding) -> tuple[Text, Text, Text, Text]:
    text = Text(finding.found)
    if finding.advice:
        text.append(f"\n-> {finding.advice}", style="bold")
    level = Text(finding.level, style=LEVEL_COLOURS[finding.level])
    return Text(finding.check), Text(finding.about), level, text


# ---- Numbers and times ----

DIGITS: Final = 3
"""The number of significant digits of numbers in a line."""
MAX_METRICS: Final = 8
"""The largest number of metrics in a line; thirty would fill half a screen."""
FULL, HALF, EMPTY = "━", "╸", "─"


def number_text(value: float) -> str:
    """Format a number with three significant digits, such as "1.50" or "0.0432"; zero as "0"."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 6:
        return f"{value:.{DIGITS - 1}e}"
    return f"{value:,.{max(0, DIGITS - 1 - exponent)}f}"


def duration_text(seconds: float) -> str:
    """Format a duration as "2:10" or "1:02:10", and from 100 hours on in days."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 100:
        return f"{whole / 86_400:,.0f} days"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def few(names: Sequence[str]) -> Sequence[str]:
    """Return the first metric names, as many as a line shows."""
    return names[:MAX_METRICS]


def more_text(names: Sequence[str]) -> str:
    """Format the number of metrics that a line leaves out: "57 more metrics"; "" for none."""
    num_more = len(names) - len(few(names))
    return "" if num_more <= 0 else counted(num_more, "more metric")


def bar_text(fraction: float, cells: int) -> str:
    """Return a progress bar of this many character cells, filled in steps of half a cell."""
    halves = math.floor(min(max(fraction, 0.0), 1.0) * cells * 2)
    bar = FULL * (halves // 2) + HALF * (halves % 2)
    return bar + EMPTY * (cells - len(bar))
