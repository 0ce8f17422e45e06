"""Executes a plan on a worker and stays with it until its result.

A broken stream is followed by re-attaching; when nobody answers at the worker's address any more,
the worker is lost. What comes between Accepted and the result (a wish for a blob, progress, log
lines) is passed on.
"""

from collections.abc import Callable
from contextlib import aclosing

import structlog

from stratagem.common.errors import UnavailableError
from stratagem.common.ids import Digest, RunId
from stratagem.coordinator.core.facts import ErrorRecord, Member, RunFailed
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.run_logs import Line
from stratagem.v1 import types_pb2, worker_pb2

log = structlog.get_logger()

OnProgress = Callable[[worker_pb2.Progress], None]


async def attend(
    env: Env,
    member: Member,
    request: worker_pb2.ExecuteRequest,
    on_progress: OnProgress | None = None,
) -> worker_pb2.ExecuteResult:
    """The result of the plan; raises UnavailableError once the worker is lost."""
    run_id = RunId(request.session.run_id)
    while True:
        link = env.links.to(member, env.state)
        try:
            async with aclosing(link.execute(request)) as messages:
                async for message in messages:
                    match message.WhichOneof("message"):
                        case "need_blob":
                            await env.push(member, run_id, Digest(message.need_blob.digest))
                        case "progress":
                            if on_progress is not None:
                                on_progress(message.progress)
                        case "log":
                            env.logs.add(run_id, _line(message.log))
                        case "result":
                            return message.result
        except UnavailableError as error:
            if not await link.answers():
                await env.lose(member, f"connection lost: {error}")
                raise
            log.info("stream broke, attaching again", worker_id=member.worker_id)


async def fail_run(env: Env, run_id: RunId, error: types_pb2.UserError) -> None:
    """The user's code raised: the run fails with what was raised, and is not retried."""
    record = ErrorRecord(
        type=error.type,
        message=error.message,
        traceback=error.traceback,
        worker_id=error.worker_id,
        activity=error.activity,
    )
    reason = f"{record.type}: {record.message} (worker {record.worker_id}, {record.activity})"
    await env.report(run_id, RunFailed(reason=reason, error=record))


def _line(line: worker_pb2.LogLine) -> Line:
    return Line(line.time_s, line.worker_id, line.level, line.text)
