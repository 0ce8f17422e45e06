"""The pictures of a federation: its clients, its rounds, and how long clients take."""

import math
from functools import partial

from stratagem.client.course.client_in_round import ClientState
from stratagem.client.course.rounds import Round
from stratagem.client.pictures.client_grid import ClientCell, client_grid
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.histogram import histogram
from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.rounds import RoundBar
from stratagem.client.pictures.rounds import rounds as rounds_picture
from stratagem.client.report.panel import Panel, by_width
from stratagem.client.report.run_values import ReportedRun


def federated_panels(run: ReportedRun, party: str = "", quorum: float | None = None) -> list[Panel]:
    """Return clients, rounds, and how long clients took. quorum: as the strategy has it, a count or
    a share of the clients that were selected."""
    course = run.course.parties[party]
    found, known, times = course.rounds, course.clients, course.client_times
    cells = [
        ClientCell(
            *(str(each.client), each.state or "", each.loss, each.num_samples),
            "; ".join(filter(None, [each.worker_id, each.reason and f"rejected: {each.reason}"])),
            "" if each.benched_until is None else f"round {each.benched_until}",
        )
        for each in known
    ]
    bars = [_bar(each, quorum) for each in found]
    panels: list[Panel] = []
    if cells:
        note = "Each client in the newest round that it was selected for."
        grid = partial(client_grid, cells, title="Clients")
        panels.append(Panel("clients", "Clients", by_width(grid), note))
    if bars:
        all_rounds = partial(rounds_picture, bars, title="Rounds")
        panels.append(Panel("rounds", "Rounds", by_width(all_rounds)))
    if any(map(math.isfinite, times)):

        def seconds(width: int) -> Picture:
            name = "time of an update"
            title = "Time of the clients"
            wide = min(width, 420)
            return histogram(times, title=title, name=name, form=duration, width=wide)

        note = (
            "The time that a client's worker has computed for an update. Members shows the time "
            "from when a client was assigned until its update was there, with all waiting."
        )
        panels.append(Panel("client-times", "How long clients take", seconds, note))
    return panels


def _bar(found: Round, quorum: float | None) -> RoundBar:
    counts = {str(state): found.count(state) for state in ClientState}
    needed = found.num_needed
    if needed is None and quorum is not None:
        selected = found.num_selected
        needed = quorum if isinstance(quorum, int) else math.ceil(quorum * selected - 1e-9)
        needed = max(1, min(needed, selected))
    return RoundBar(found.number, found.loss, counts, needed, found.seconds, found.deadline_s)
