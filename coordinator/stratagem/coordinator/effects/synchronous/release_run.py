"""Release: the workers forget an ended run. A worker that is gone has forgotten it already."""

import asyncio

from stratagem.common.base.errors import StratagemError
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.core.effects import Release
from stratagem.coordinator.core.facts import Member, RunReleased
from stratagem.coordinator.effects.execution.effect_context import EffectContext


async def release(env: EffectContext, effect: Release) -> None:
    """Close the run on every worker that is left, and report RunReleased."""
    env.forget(effect.run_id)
    await asyncio.gather(*(_close(env, effect, member) for member in effect.members))
    failpoint("coordinator.run.released")
    await env.report(effect.run_id, RunReleased())


async def _close(env: EffectContext, effect: Release, member: Member) -> None:
    try:
        await env.links.to(member, env.state).close_session(effect.run_id)
    except StratagemError as error:
        # Its sessions end with its process, or when it next asks about the run.
        worker_id = member.worker_id
        env.say("not released", effect.run_id, worker_id=worker_id, why=str(error))
