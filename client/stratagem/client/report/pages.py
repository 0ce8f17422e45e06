"""Write one run, or a comparison of several, as a page of HTML without scripts or external
resources.

Equal runs give equal bytes. Each picture is in the page twice, for wide and for narrow screens,
with a table of its numbers. Text from the run, the job or the user's code is escaped, never markup.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Final

from stratagem.client.course.members import progress_text, time_text
from stratagem.client.course.population import winner_text
from stratagem.client.pictures.axes import duration, short
from stratagem.client.pictures.svg import NumberTable, escaped, stylesheet
from stratagem.client.report.comparison import Comparison
from stratagem.client.report.panels import NOTES, Panel, curve_panels
from stratagem.client.report.run import ReportedRun
from stratagem.client.report.run_panels import strategy_panels, time_line_panel
from stratagem.common.base.text import values_text, without_spreads

# ---- Document ----

WIDE: Final = 760
NARROW: Final = 340

_STYLE: Final = """
body{margin:0 auto;max-width:760px;padding:1.2rem 1rem 3rem;background:var(--sg-surface);
color:var(--sg-ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
h3{font-size:1rem;margin:1.4rem 0 .3rem;font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:1rem 0;font-size:.9rem}
a{color:var(--sg-s1)}p{margin:.3rem 0}.muted,figcaption{color:var(--sg-muted)}
.small{font-size:.85rem;margin:.15rem 0}
figure{margin:0 0 1.2rem}figcaption{font-size:.85rem}
.phase{font-weight:600}.COMPLETED{color:var(--sg-good)}.FAILED{color:var(--sg-bad)}
.CANCELLED,.RECOVERING{color:var(--sg-warn)}
.error{border-left:4px solid var(--sg-bad);padding:.2rem 0 .2rem .9rem;margin:1rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--sg-grid);
border-radius:6px;padding:.7rem .9rem;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--sg-grid);
vertical-align:top;overflow-wrap:break-word}
td{font-variant-numeric:tabular-nums}th{font-weight:600}tbody th{font-weight:400}
.scroll{overflow-x:auto}summary{cursor:pointer;color:var(--sg-muted);font-size:.85rem}
.narrow{display:none}ul{padding-left:1.2rem;margin:.3rem 0}
@media (max-width:560px){.wide{display:none}.narrow{display:block}}
@media print{nav,details:not([open]){display:none}.wide{display:block}.narrow{display:none}
figure,tr,.error{break-inside:avoid}body{font-size:11pt}}
"""

Section = tuple[str, str, str]
"""A section of a page: its id for links, its title, and its HTML content."""


def document(title: str, header: str, sections: Sequence[Section], made_at: str) -> str:
    """Return an HTML page. title: text; header: HTML before the links; made_at: time, in words."""
    links = "".join(f'<a href="#{name}">{escaped(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escaped(title)}</h2>{content}</section>'
        for name, title, content in sections
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{stylesheet()}{_STYLE}</style></head><body>"
        f'{header}<nav aria-label="Sections">{links}</nav><main>{body}</main>'
        f'<footer><p class="muted">made at {escaped(made_at)}</p></footer></body></html>\n'
    )


def figure(panel: Panel, *, has_heading: bool = True) -> str:
    """Return a picture for wide and for narrow screens, with its numbers, as HTML."""
    wide, narrow = panel.draw(WIDE), panel.draw(NARROW)
    heading = f"<h3>{escaped(panel.title)}</h3>" if has_heading else ""
    note = f"<figcaption>{escaped(panel.note)}</figcaption>" if panel.note else ""
    numbers = (
        f'<details><summary>Numbers</summary><div class="scroll">{wide.table.to_html()}</div>'
        "</details>"
    )
    return (
        f'{heading}<figure><div class="wide">{wide.svg}</div>'
        f'<div class="narrow">{narrow.svg}</div>{note}</figure>{numbers}'
    )


# ---- Page of a run ----

MAX_EVENTS: Final = 500


def page(run: ReportedRun, made_at: str) -> str:
    """Return the HTML report of a run. made_at: the time as text; the rest follows from the run."""
    title = f"{run.status.run_id} · {run.status.strategy or 'evaluation'}"
    header = f"<header>{_header(run)}</header>{_error(run)}"
    return document(title, header, list(_sections(run)), made_at)


def _header(run: ReportedRun) -> str:
    status = run.status
    winner = winner_text(status)
    parts = [
        f"<h1>{escaped(status.run_id)}</h1>",
        f'<p><span class="phase {escaped(status.phase)}">{escaped(status.phase)}</span> '
        f"{escaped(status.strategy or 'evaluation')}</p>",
        f"<p>{escaped(status.reason)}</p>",
    ]
    if winner:
        parts.append(f"<p>Best: {escaped(winner)}</p>")
    return "".join(parts)


def _error(run: ReportedRun) -> str:
    error = run.status.error
    if error is None:
        return ""
    where = f"in your code on {error.worker_id}, {error.activity}"
    head = f"<p><strong>{escaped(error.type)}</strong>: {escaped(error.message)}</p>"
    return (
        f'<section class="error" role="alert">{head}<p class="muted">{escaped(where)}</p>'
        f"<pre>{escaped(error.traceback.rstrip())}</pre></section>"
    )


def _sections(run: ReportedRun) -> Iterator[Section]:
    yield "overview", "Overview", _overview(run)
    curves, of_strategy = curve_panels(run), strategy_panels(run)
    if curves:
        yield "curves", "Curves", "".join(map(figure, curves))
    if of_strategy:
        schedule = _schedule(run)
        title = run.strategy.get("type") or "Members"
        yield "strategy", str(title), "".join(map(figure, of_strategy)) + schedule
    if run.events:
        yield "time-line", "Time line", figure(time_line_panel(run), has_heading=False)
    if run.status.commits:
        yield "commits", "Commits", _commits(run)
    if run.events:
        yield "events", "Events", _events(run)
    text = json.dumps(run.job, indent=2, ensure_ascii=False, default=str)
    yield "job", "Job", f"<pre>{escaped(text)}</pre>"


def _overview(run: ReportedRun) -> str:
    status = run.status
    metrics = [(name, short(value)) for name, value in sorted(status.metrics.items())]
    rows = [
        ("name", status.name),
        ("progress", progress_text(status)),
        ("time", duration(run.seconds) if run.events else ""),
        ("submitted", _submitted(run)),
        ("workers", ", ".join(_workers(run))),
        ("lost workers", ", ".join(_lost(run))),
        ("engine", status.engine),
        ("verification", status.verification),
        ("sent", _sent(run)),
        ("result", "reproducible" if status.reproducible else "replayable, not reproducible"),
        *metrics,
    ]
    facts = tuple((name, value) for name, value in rows if value)
    table = NumberTable(("", ""), facts).to_html().replace("<thead>", '<thead hidden="">', 1)
    notes = [f"{name}: {NOTES[name]}" for name, _ in metrics if name in NOTES]
    return table + "".join(f'<p class="muted small">{escaped(text)}</p>' for text in notes)


def _submitted(run: ReportedRun) -> str:
    when = time_text(run.status.submitted_at_s)
    return f"{when} by {run.status.submitted_by}" if run.status.submitted_by else when


def _workers(run: ReportedRun) -> Sequence[str]:
    """Return the names of all workers that were members, or trained clients."""
    seen = dict.fromkeys(stay.worker_id for stay in run.course.members.intervals)
    for event in run.events:
        if event.kind == "ClientsAssigned":
            assigned = (assignment["member"] for assignment in event.payload["assignments"])
            seen |= dict.fromkeys(member["worker_id"] for member in assigned if member)
    return sorted(seen or run.status.worker_ids)


def _lost(run: ReportedRun) -> Sequence[str]:
    return [stay.worker_id for stay in run.course.members.intervals if stay.is_lost]


def _sent(run: ReportedRun) -> str:
    """Format the number of bytes that clients sent, and would have sent without a codec."""
    sent = plain = 0
    for event in run.events:
        if event.kind in ("SegmentFinished", "UpdateReceived"):
            traffic = event.payload.get("traffic") or {}
            sent += traffic.get("sent_bytes", 0)
            plain += traffic.get("uncompressed_bytes", 0)
    return f"{sent:,} bytes, {plain:,} uncompressed" if sent else ""


def _schedule(run: ReportedRun) -> str:
    """Return an HTML table of the hyperparameters that a population's winner was trained with."""
    if run.strategy.get("type") != "PopulationBased":
        return ""
    population = run.course.population.population
    best = population.best
    if best is None:
        return ""
    rows = tuple(
        (str(step), values_text(params))
        for step, params in population.schedule(best.member, best.generation)
    )
    table = NumberTable(("from step", "hyperparameters"), rows).to_html()
    return f"<h3>The winner's schedule</h3>{table}"


def _commits(run: ReportedRun) -> str:
    rows = []
    for commit in run.status.commits:
        values = sorted(without_spreads(commit.metrics).items())
        metrics = ", ".join(f"{name} {short(value)}" for name, value in values)
        kinds = "best" if commit.is_best else ""
        rows.append((str(commit.segment), str(commit.step), kinds, metrics))
    table = NumberTable(("segment", "step", "kept as", "metrics"), tuple(rows))
    return f'<div class="scroll">{table.to_html()}</div>'


def _events(run: ReportedRun) -> str:
    events = run.events[-MAX_EVENTS:]
    rows = tuple(
        (str(event.index), duration(max(event.time_s - run.began_s, 0.0)), event.sentence)
        for event in events
    )
    num_earlier = len(run.events) - len(events)
    before = f'<p class="muted">{num_earlier} earlier ones are left out.</p>' if num_earlier else ""
    table = NumberTable(("event", "after", "what"), rows).to_html()
    summary = f"<summary>{len(events)} events</summary>"
    return f'{before}<details>{summary}<div class="scroll">{table}</div></details>'


# ---- Comparison ----


def comparison_page(compared: Comparison, made_at: str) -> str:
    """Return the HTML report that compares runs. made_at: the time as text; the rest depends on the
    runs only."""
    sections: list[Section] = [
        ("runs", "Runs", f'<div class="scroll">{compared.runs_table.to_html()}</div>'),
        ("jobs", "Where their jobs differ", _differences(compared)),
    ]
    if panels := compared.panels:
        sections.append(("curves", "Curves", "".join(map(figure, panels))))
    names = " · ".join(compared.run_ids)
    header = f"<h1>{escaped(f'{len(compared.runs)} runs')}</h1><p>{escaped(names)}</p>"
    return document(names, header, sections, made_at)


def _differences(compared: Comparison) -> str:
    if not compared.differences:
        return "<p>Their jobs are equal.</p>"
    return f'<div class="scroll">{compared.differences_table.to_html()}</div>'
