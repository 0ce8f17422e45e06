"""The hand-over to a coordinator that sums, and that its sums have the mesh's bits."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.numerics.shards import Node, assign_shards, tree_nodes, tree_sum
from stratagem.coordinator.effects.parameter_server import fold_chunks
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.exchange import (
    ExchangeError,
    GradientBuckets,
    ServerTransport,
    parameter_server,
    server_exchange,
)
from stratagem.worker.exchange.gradient_streams import GradientPort
from tests.common.compression.support import CODECS
from tests.jobs import job
from tests.patience import PATIENCE_S
from tests.worker.engine.support import trainer_of
from tests.worker.exchange.cases import SMALL, Case, one_step
from tests.worker.mesh.late_device import LateDevice

CHUNK_BYTES = 1 << 18


@contextmanager
def members(
    case: Case, size: int, deadline_s: float = PATIENCE_S
) -> Iterator[tuple[list[ServerTransport], list["asyncio.Future[list[bytes]]"]]]:
    """Each member computes step 7 in a thread of its own."""
    made = []
    for rank in range(size):
        params, buckets = case.make_buckets()
        exchange, transport = server_exchange(
            buckets, rank, size, case.num_shards, deadline_s=deadline_s
        )
        made.append((params, exchange, transport))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(size) as pool:
        steps = [
            loop.run_in_executor(pool, one_step, exchange, params, case, 7)
            for params, exchange, _ in made
        ]
        try:
            yield [transport for *_, transport in made], steps
        finally:
            for *_, transport in made:
                transport.close()


async def serve_step(transports: list[ServerTransport], case: Case) -> None:
    """What the coordinator does: bucket by bucket, chunk by chunk."""
    freights = [await transport.freight(7) for transport in transports]
    offset = 0
    for bucket, total in enumerate(freights[0].inbox):
        dtype = str(total.dtype).removeprefix("torch.")
        held = []
        for transport, freight in zip(transports, freights, strict=True):
            nodes = [entry.node for entry in freight.entries() if entry.bucket == bucket]
            views = await transport.partials(7, bucket)
            assert [view.nbytes for view in views] == [total.nbytes] * len(nodes)
            held.append(dict(zip(nodes, views, strict=True)))
        for start in range(0, total.nbytes, CHUNK_BYTES):
            chunks = [
                {
                    node: np.frombuffer(view[start : start + CHUNK_BYTES], dtype)
                    for node, view in h.items()
                }
                for h in held
            ]
            data = fold_chunks(chunks, case.num_live).tobytes()
            for transport in transports:
                transport.stage(7, offset, data)
            offset += len(data)
    assert offset == sum(total.nbytes for total in freights[0].inbox)
    for transport in transports:
        transport.commit(7)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (1, Case(1, 1)),
        (2, Case(2, 2, divisor=3.0)),
        (2, Case(5, 5, SMALL, dtype=torch.float64)),
        (3, Case(4, 2, SMALL)),
        (3, Case(4, 4, SMALL, dtype=torch.bfloat16, num_rest=0)),
    ],
)
async def test_sums_through_the_coordinator_have_the_bits_of_the_tree(
    monkeypatch: pytest.MonkeyPatch, size: int, case: Case
) -> None:
    """Partial sums are read when they have reached the host."""
    device = LateDevice()
    monkeypatch.setattr(parameter_server, "to_host", device.to_host)
    with members(case, size) as (transports, steps):
        for transport in transports:
            await transport.partials(7, transport.num_buckets - 1)
        num_begun = device.num_begun  # all of them, though nobody has asked for the others
        await serve_step(transports, case)
        for step in steps:
            assert await step == case.expected(7)
    assert device.num_begun == num_begun > 0
    assert threading.get_ident() not in device.waited_in


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 2])
async def test_sums_from_a_gpu_have_the_same_bits(size: int) -> None:
    case = Case(3, 3, divisor=3.0, device="cuda:0")
    with members(case, size) as (transports, steps):
        await serve_step(transports, case)
        for step in steps:
            assert await step == case.expected(7)


async def test_a_member_sends_what_its_header_names() -> None:
    case = Case(2, 2, SMALL)
    params, buckets = case.make_buckets()
    exchange, transport = server_exchange(buckets, 0, 2, case.num_shards)
    await assert_sends_its_vectors(transport, lambda: one_step(exchange, params, case, 1))


@pytest.mark.parametrize("codec", ["int8", "ternary"])
async def test_coded_vectors_are_sent_once_though_there_are_several_buckets(codec: str) -> None:
    aggregation = {"method": "ParameterServer"}
    strategy = {"type": "DataParallel", "num_replicas": 2, "aggregation": aggregation}
    spec = job("dropout_mlp", compression=CODECS[codec], strategy=strategy)
    trainer = trainer_of(spec)
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras, bucket_bytes=1)
    exchange, transport = server_exchange(buckets, 0, 2, 3, compressor=trainer.compressor)
    await assert_sends_its_vectors(transport, lambda: trainer.train_step(exchange, range(2), 3))


async def assert_sends_its_vectors(transport: ServerTransport, step: Callable[[], object]) -> None:
    """The chunks of step 1 are without gaps and as long as the vectors of the header."""
    port = GradientPort()
    port.open(0, 0, transport)
    with ThreadPoolExecutor(1) as pool:
        ended = asyncio.get_running_loop().run_in_executor(pool, step)
        try:
            async with asyncio.timeout(PATIENCE_S):
                header, *frames = [response async for response in port.outgoing(0, PATIENCE_S)]
        finally:
            transport.close()
        with pytest.raises(ExchangeError):
            await ended
    chunks = [pb.GetGradientsResponse.FromString(cast(bytes, frame)).chunk for frame in frames]
    ends = list(accumulate(len(chunk.data) for chunk in chunks))
    assert [chunk.offset for chunk in chunks] == [0, *ends[:-1]]
    assert ends[-1] == header.header.manifest.total_bytes
    assert transport.num_buckets > 1


async def test_a_stream_may_begin_again_but_not_skip_or_end_early() -> None:
    case = Case(1, 1, sizes=(100,), num_rest=1)
    with members(case, 1) as (transports, steps):
        transport = transports[0]
        await transport.partials(7, 1)
        with pytest.raises(ValueError, match="expected offset 0"):
            transport.stage(7, 8, b"x")
        transport.stage(7, 0, b"\xff" * 16)
        num_bytes = sum(total.nbytes for total in (await transport.freight(7)).inbox)
        with pytest.raises(ValueError, match="commit after 16 of"):
            transport.commit(7)
        with pytest.raises(ValueError, match="expected offset 16"):
            transport.stage(7, 16, bytes(num_bytes))
        with pytest.raises(ExchangeError, match="step 8 is not under way"):
            transport.stage(8, 0, b"x")
        await serve_step(transports, case)
        assert await steps[0] == case.expected(7)
        with pytest.raises(ExchangeError, match="not under way"):
            transport.commit(7)


@pytest.mark.parametrize("how", ["cut", "close"])
async def test_a_cut_ends_both_sides(how: str) -> None:
    case = Case(1, 1, sizes=(100,))
    with members(case, 1) as (transports, steps):
        await transports[0].partials(7, 1)
        later = asyncio.create_task(transports[0].partials(8, 0))
        await asyncio.sleep(0)
        threading.Thread(target=getattr(transports[0], how)).start()
        with pytest.raises(ExchangeError, match="cut"):
            await later
        with pytest.raises(ExchangeError, match="cut"):
            await steps[0]


async def test_a_silent_coordinator_is_given_up_at_the_deadline() -> None:
    case = Case(1, 1, sizes=(10,))
    silence = pytest.raises(ExchangeError, match=r"no sums came within 0\.05 s")
    with members(case, 1, deadline_s=0.05) as (_, steps), silence:
        await steps[0]


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 2**32 - 1),
)
def test_fold_has_the_bits_of_the_torch_sum(
    n: int, size: int, dtype: type[np.floating], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    leaves = {
        Node(i, i + 1): (generator.standard_normal(50) * 10.0 ** generator.integers(-6, 6)).astype(
            dtype
        )
        for i in range(n)
    }
    tensors = {node: torch.from_numpy(value.copy()) for node, value in leaves.items()}
    expected = tree_sum(tensors, n, lambda a, b: a + b).numpy().tobytes()
    held = [
        {
            node: fold_chunks(
                [
                    {
                        Node(i - node.first, i - node.first + 1): leaves[Node(i, i + 1)]
                        for i in range(*node)
                    }
                ],
                node.stop - node.first,
            )
            for node in tree_nodes(owned, n)
        }
        for owned in assign_shards(max(n, size), size)
    ]
    copies = [{node: value.copy() for node, value in one.items()} for one in held]
    assert fold_chunks(held, n).tobytes() == expected
    for one, copy in zip(held, copies, strict=True):
        assert all(np.array_equal(one[node], copy[node]) for node in copy), "input was modified"


def test_fold_refuses_what_does_not_cover() -> None:
    one = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="two members hold"):
        fold_chunks([{Node(0, 1): one}, {Node(0, 1): one}], 2)
    with pytest.raises(ValueError, match="hold 1 shards, the step has 2"):
        fold_chunks([{Node(0, 1): one}], 2)
    with pytest.raises(ValueError, match="differ"):
        fold_chunks([{Node(0, 1): one}, {Node(1, 2): one.astype(np.float64)}], 2)
