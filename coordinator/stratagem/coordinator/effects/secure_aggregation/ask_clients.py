"""Asks the clients of a secure round for one step, all at once, and tells who has not answered.

A client that refuses will refuse again. One whose worker is away, or does not answer, may answer
later: the step is the same bytes then.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc.aio

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError, told
from stratagem.common.base.ids import WorkerId
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.coordinator.core.effects import AggregateRound, PostKeys, RouteShares, SecureParty
from stratagem.coordinator.core.facts import LeftOut
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.v1 import worker_pb2 as pb

TIMEOUT_S: Final = 60.0
MAX_AT_ONCE: Final = 32
MAX_REASON_CHARS: Final = 300
_CAUSES: Final = {
    cause.value: cause for cause in (Cause.KEYS_LOST, Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW)
}

Step = Callable[[int], pb.SecureRoundRequest]
"""The request for a client; run, round and client are filled in."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What has become of a step, by client."""

    given: dict[int, pb.SecureRoundResponse] = field(default_factory=dict)
    refused: dict[int, LeftOut] = field(default_factory=dict)
    away: dict[int, str] = field(default_factory=dict)
    """Why there is no answer now."""

    def left_out(self, may_leave_out: bool, num_needed: int) -> tuple[LeftOut, ...]:
        """Return the clients that the round goes on without. Raises UnavailableError where it does
        not go on: some are away, and none may be left out, or too few would remain."""
        if self.away and not (may_leave_out and len(self.given) >= num_needed):
            client, reason = min(self.away.items())
            more = f" and {len(self.away) - 1} more" if len(self.away) > 1 else ""
            raise UnavailableError(f"it waits for client {client}{more}: {reason}")
        absent = [
            LeftOut(client=client, reason=reason, cause=Cause.ABSENT)
            for client, reason in self.away.items()
        ]
        everybody = [*self.refused.values(), *absent]
        return tuple(sorted(everybody, key=lambda each: each.client))


async def ask(
    env: EffectContext,
    effect: PostKeys | RouteShares | AggregateRound,
    party: SecureParty,
    clients: Sequence[int],
    step: Step,
    check: Callable[[int, pb.SecureRoundResponse], None],
) -> Answers:
    """Return the answers of these clients. check: raises InvalidInputError for an answer that is
    none to the step; its client is left out."""
    answers, workers = Answers(), dict(party.workers)
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(client: int) -> None:
        async with room:
            try:
                request = step(client)
                request.run_id, request.party = effect.run_id, effect.party
                request.round_num, request.attempt = effect.round_num, party.attempt
                request.client = client
                answer = await _asked(env, workers[client], request)
                if not answer.HasField("refused"):
                    check(client, answer)
            except InvalidInputError as error:
                answers.refused[client] = _left_out(client, str(error), Cause.LAYOUT)
            except StratagemError as error:
                answers.away[client] = told(error)
            else:
                if answer.HasField("refused"):
                    cause = _CAUSES.get(answer.refused.cause, Cause.REFUSED_BY_SITE)
                    answers.refused[client] = _left_out(client, answer.refused.reason, cause)
                else:
                    answers.given[client] = answer

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(one(client))
    return answers


async def _asked(
    env: EffectContext, worker_id: WorkerId, request: pb.SecureRoundRequest
) -> pb.SecureRoundResponse:
    """Return the worker's answer. Raises UnavailableError while it is away."""
    worker = env.state.workers.get(worker_id)
    if worker is None or not worker.is_usable:
        raise UnavailableError(f"worker {worker_id} is not here")
    link = env.links.to(worker.member, env.state)
    request.fence.CopyFrom(link.fence(0))
    try:
        answer: pb.SecureRoundResponse = await link.stub.SecureRound(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer


def _left_out(client: int, reason: str, cause: Cause) -> LeftOut:
    line = " ".join(reason.split())[:MAX_REASON_CHARS]
    return LeftOut(client=client, reason=line, cause=cause)


def by_client(shares: Sequence[pb.SealedShare]) -> Mapping[int, bytes]:
    return {each.client: each.sealed for each in shares}
