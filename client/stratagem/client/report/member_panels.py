"""The picture of a run's members: which worker did what for which party, and until when."""

from collections.abc import Iterator
from typing import Final

from stratagem.client.course.client_in_round import ClientInRound, ClientState
from stratagem.client.course.rounds import Round
from stratagem.client.pictures.members import Stay
from stratagem.client.pictures.members import members as members_picture
from stratagem.client.pictures.picture import Picture
from stratagem.client.report.panel import Panel
from stratagem.client.report.run_values import ReportedRun

EVALUATES: Final = "member that evaluates"
MAX_CLIENTS: Final = 1000
"""Of a federation, in its newest rounds, that have a bar."""


def member_panels(run: ReportedRun) -> list[Panel]:
    """Return a lane for each worker, if there was any."""
    stays = [*_memberships(run), *_clients(run)]
    if not stays:
        return []

    aways = [
        (each.began_s - run.began_s, each.ended_s - run.began_s)
        for each in run.course.outages.outages
    ]

    def draw(width: int) -> Picture:
        return members_picture(stays, title="Members", now=run.seconds, aways=aways, width=width)

    trained = max(
        sum(len(each.clients) for each in party.rounds) for party in run.course.parties.values()
    )
    notes = []
    if trained:
        notes.append(
            "A client's bar reaches from when it was assigned until its update was there, with all "
            f"waiting; the bar of a {EVALUATES} reaches over its whole membership."
        )
    if trained > MAX_CLIENTS:
        notes.append(f"Of clients the newest {MAX_CLIENTS} at most.")
    if aways:
        notes.append(
            "While the coordinator was away, members went on with what they had; it may have left "
            "later than drawn, as it writes down only what happens."
        )
    return [Panel("members", "Members", draw, " ".join(notes))]


def _memberships(run: ReportedRun) -> Iterator[Stay]:
    for each in run.course.members.intervals:
        # The members of a federation evaluate its states; its clients are trained by all.
        evaluates = bool(run.course.parties[each.party].rounds)
        yield Stay(
            *(each.worker_id, _of(each.party, EVALUATES) if evaluates else each.party),
            each.began_s - run.began_s,
            None if each.ended_s is None else each.ended_s - run.began_s,
            each.ending,
            each.is_lost,
        )


def _clients(run: ReportedRun) -> Iterator[Stay]:
    """Yield what workers have done for the clients of federations, of the newest rounds."""
    for path, party in run.course.parties.items():
        left = MAX_CLIENTS
        for found in reversed(party.rounds):
            left -= len(found.clients)
            if left < 0 and found is not party.rounds[-1]:
                break
            for client in found.clients[:MAX_CLIENTS]:
                if client.worker_id and client.assigned_s is not None and not client.staleness:
                    yield _stay(run, path, found, client, client.assigned_s)


def _stay(run: ReportedRun, path: str, found: Round, client: ClientInRound, began_s: float) -> Stay:
    ended_s = client.answered_s
    if ended_s is None and found.seconds is not None:
        ended_s = max(found.began_s + found.seconds, began_s)
    told = str(client.state) if ended_s is not None else "not answered so far"
    if client.state is ClientState.REJECTED:
        told = f"rejected: {client.reason}"
    return Stay(
        *(client.worker_id, _of(path, "clients"), began_s - run.began_s),
        None if ended_s is None else ended_s - run.began_s,
        f"round {found.number}: {told}",
        task=f"client {client.client}",
    )


def _of(path: str, what: str) -> str:
    return f"{path}: {what}" if path else what
