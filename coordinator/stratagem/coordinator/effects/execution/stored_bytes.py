"""Stores bytes that a fact will name, and that are no state of a model, as a blob."""

from stratagem.common.base.ids import Digest
from stratagem.coordinator.effects.execution.effect_context import EffectContext


async def stored_bytes(env: EffectContext, data: bytes) -> Digest:
    """Return the name of the blob with these bytes, once it is durable."""
    return await env.in_thread(lambda: _stored(env, data))


def _stored(env: EffectContext, data: bytes) -> Digest:
    writer = env.blobs.writer(len(data))
    try:
        writer.write(data)
        return writer.commit()
    except BaseException:
        writer.abort()
        raise
