"""Coded shards between members: the bits of the compressed loop, and the bytes that were sent."""

import asyncio

import pytest

from stratagem.common.numerics.shards import assign_shards
from stratagem.worker.engine import Trainer
from stratagem.worker.exchange import ExchangeError, GradientBuckets, mesh_exchange
from stratagem.worker.exchange.layout import BUCKET_BYTES
from stratagem.worker.mesh import Link
from tests.common.compression.support import CODECS
from tests.jobs import job, user_data
from tests.patience import PATIENCE_S
from tests.reference.compressed_loop import compressed_loop
from tests.worker.engine.support import ALLOWED, assert_same_bits, model_of, trainer_of
from tests.worker.mesh.engines import links_of
from tests.worker.mesh.grpc_party import grpc_party

NUM_STEPS = 5
# Tags of 50 rows in batches of 16: the last batch of an epoch has 2 rows.
DATA = user_data("classes", num_rows=50)


def member(
    link: Link, trainer: Trainer, num_shards: int, num_steps: int, bucket_bytes: int = BUCKET_BYTES
) -> str:
    """Trains; the engine's name."""
    num_extras = trainer.num_extras
    buckets = GradientBuckets(trainer.params, num_extras=num_extras, bucket_bytes=bucket_bytes)
    exchange = mesh_exchange(
        buckets, link, num_shards, deadline_s=PATIENCE_S, compressor=trainer.compressor
    )
    owned = assign_shards(num_shards, link.size)[link.rank]
    try:
        for _ in range(num_steps):
            trainer.train_step(exchange, owned, num_shards)
        return exchange.name
    finally:
        exchange.close()


@pytest.mark.parametrize(
    ("name", "num_members", "num_shards", "engine", "bucket_bytes"),
    [
        ("ternary", 2, 3, "grpc payloads, ternary", BUCKET_BYTES),
        ("ternary", 3, 7, "grpc payloads, ternary", 1),
        ("low_rank", 3, 4, "grpc payloads, low_rank", 1),
        ("vsa-int8", 2, 2, "grpc payloads, vsa", 1),
        # Four shards of half the bytes are no fewer than a sum there and back.
        ("fp16", 3, 4, "grpc, fp16", 1),
    ],
)
async def test_members_have_the_bits_of_the_compressed_loop(
    name: str, num_members: int, num_shards: int, engine: str, bucket_bytes: int
) -> None:
    spec = job("mlp", compression=CODECS[name], strategy=_strategy(num_shards), data=DATA)
    trainers = [trainer_of(spec) for _ in range(num_members)]
    async with grpc_party(num_members) as links:
        names = await asyncio.gather(
            *(
                asyncio.to_thread(member, link, trainer, num_shards, NUM_STEPS, bucket_bytes)
                for link, trainer in zip(links, trainers, strict=True)
            )
        )
    expected = compressed_loop(spec, ALLOWED, num_shards, NUM_STEPS)
    assert set(names) == {engine}
    for rank, trainer in enumerate(trainers):
        assert_same_bits(model_of(trainer), dict(expected.state))
        assert trainer.compressor is not None
        traffic = trainer.compressor.take_traffic()
        if "payloads" in engine:
            # The fourth batch has 2 rows, so 2 live shards.
            owned = assign_shards(num_shards, num_members)[rank]
            num_live = sum(4 + (shard < 2) for shard in owned)
            num_messages = num_live * (num_members - 1)
            beside = 8 * (len(bucket_sizes(trainer, bucket_bytes)) - 1)  # weights
            size = trainer.compressor.message_bytes + beside
            assert traffic.sent_bytes == num_messages * size


def bucket_sizes(trainer: Trainer, bucket_bytes: int) -> list[int]:
    """Of the portions of a message."""
    assert trainer.compressor is not None
    buckets = GradientBuckets(
        trainer.params, num_extras=trainer.num_extras, bucket_bytes=bucket_bytes
    )
    return [each.num_bytes for each in trainer.compressor.portions(buckets.layout)]


async def test_gloo_carries_messages_too() -> None:
    """Bucket by bucket."""
    spec = job("mlp", compression="ternary", strategy=_strategy(2))
    trainers = [trainer_of(spec) for _ in range(2)]
    with links_of("gloo", 2) as links:
        names = await asyncio.gather(
            *(
                asyncio.to_thread(member, link, trainer, 2, NUM_STEPS, bucket_bytes=1)
                for link, trainer in zip(links, trainers, strict=True)
            )
        )
    assert set(names) == {"gloo payloads, ternary"}
    expected = compressed_loop(spec, ALLOWED, 2, NUM_STEPS)
    for trainer in trainers:
        assert_same_bits(model_of(trainer), dict(expected.state))


async def test_a_member_that_leaves_fails_the_others_soon() -> None:
    spec = job("mlp", compression="ternary", strategy=_strategy(2))
    trainers = [trainer_of(spec) for _ in range(2)]
    async with grpc_party(2) as links:
        left = asyncio.to_thread(member, links[1], trainers[1], 2, 2)
        stays = asyncio.to_thread(member, links[0], trainers[0], 2, 3)
        results = await asyncio.gather(left, stays, return_exceptions=True)
    assert isinstance(results[1], ExchangeError)
    assert trainers[0].step == 2
    assert_same_bits(model_of(trainers[0]), model_of(trainers[1]))


def _strategy(num_replicas: int) -> dict[str, object]:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": "AllReduce"},
    }
