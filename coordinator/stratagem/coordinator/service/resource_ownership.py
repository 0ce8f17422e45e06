"""Checks that a caller may use the resources a call names: the coordinator's part of the table of
calls.

Reads the state and decides nothing else. Where callers need not identify themselves, every caller
may use everything.
"""

from collections.abc import Mapping
from typing import Any, Final

from stratagem.common.base.errors import PermissionDeniedError
from stratagem.common.base.ids import Party, RunId
from stratagem.common.identity.callers import Caller, Names
from stratagem.common.rpc.server import Check
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.state_machine.strategy_boundary import parties_of
from stratagem.v1 import coordinator_pb2 as pb


def _own_run(servicer: Any, request: Any, caller: Caller) -> None:
    """Refuse a run of another owner. A run that is not known is no secret: the handler says so."""
    app: App = servicer.app
    run = app.loop.state.find(RunId(request.run_id))
    if run is not None:
        caller.must_own(request.run_id, run.owner)


def _coordinator(_servicer: Any, request: pb.DiagnoseRequest, caller: Caller) -> None:
    if caller.is_worker and not request.without_workers:
        raise PermissionDeniedError(
            f"Diagnose: {caller.name} may ask for the coordinator alone (without_workers)"
        )


def _check_member(app: App, request: Any, caller: Caller, rank: int | None = None) -> None:
    """Refuse a worker that speaks for a party, or a rank of it, that is not its own."""
    session = request.session
    run = app.loop.state.runs.get(RunId(session.run_id))
    view = None if run is None else parties_of(run).get(Party(session.party))
    if view is None or view.membership != request.fence.membership:
        return  # the handler deals with a stale membership
    members = view.members if rank is None else view.members[rank : rank + 1]
    if not caller.is_one_of(member.worker_id for member in members):
        where = f"{session.run_id}/{session.party}".rstrip("/")
        which = "no member" if rank is None else f"not member {rank}"
        raise PermissionDeniedError(f"{caller.name} is {which} of {where}")


CHECKS: Final[Mapping[Names, Check]] = {
    Names.OWN_RUN: _own_run,
    Names.OWN_DATA: lambda servicer, request, caller: servicer.check_submit(request, caller),
    Names.COORDINATOR: _coordinator,
    Names.ITSELF: lambda _servicer, request, caller: caller.must_be_worker(request.worker_id),
    Names.OWN_PARTY: lambda servicer, request, caller: _check_member(servicer.app, request, caller),
    Names.OWN_RANK: lambda servicer, request, caller: _check_member(
        servicer.app, request, caller, request.rank
    ),
}
