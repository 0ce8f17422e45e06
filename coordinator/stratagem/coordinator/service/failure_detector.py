"""Distinguishes a dead worker from a broken exchange, by asking the workers themselves."""

import asyncio

import structlog

from stratagem.common.base.errors import AlreadyExistsError, UnavailableError
from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import LoseWorker, ReportTrouble
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.state_machine.strategy_boundary import parties_of

log = structlog.get_logger()


async def look_into(app: App, run_id: RunId, party: Party, membership: int, reason: str) -> None:
    """Handle a failed exchange: lose the members that do not answer; re-form if all of them do.

    Does nothing when the membership is over already.
    """
    run = app.loop.state.runs.get(run_id)
    view = None if run is None else parties_of(run).get(party)
    if view is None or view.membership != membership:
        return
    answered = await asyncio.gather(*(_answers(app, member) for member in view.members))
    silent = [m for m, is_there in zip(view.members, answered, strict=True) if not is_there]
    names = [member.worker_id for member in silent]
    log.info("exchange failed", run_id=run_id, party=party, reason=reason, silent=names)
    for member in silent:
        await app.loop.submit(LoseWorker(member, f"does not answer ({reason})"))
    if not silent:
        await app.loop.submit(ReportTrouble(run_id, party, membership, reason))


async def meet(app: App, member: Member, address: str) -> None:
    """Call a worker back before its registration is accepted: it must answer, under the name it
    gives.

    Raises AlreadyExistsError when another process of that name is alive.
    """
    known = app.loop.state.workers.get(member.worker_id)
    is_other = known is not None and known.is_alive and known.member != member
    if known is not None and is_other and await _answers(app, known.member):
        where = known.address or "the end of a tunnel"
        message = f"worker {member.worker_id!r} lives at {where}; choose another name"
        raise AlreadyExistsError(message)
    link = app.links.open(member, address)
    try:
        trouble = await link.trouble(timeout_s=5.0)
        if trouble:
            why = await link.why_silent() or trouble
            where = address or "the end of its tunnel"
            name = member.worker_id
            raise UnavailableError(f"nobody answers at {where} as worker {name!r}: {why}")
    finally:
        await link.close()


async def _answers(app: App, member: Member) -> bool:
    try:
        return await app.links.to(member, app.loop.state).answers()
    except UnavailableError:
        return False
