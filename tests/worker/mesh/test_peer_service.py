"""The gRPC link between members: order, refusals, and what happens when somebody goes."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from stratagem.common.base.errors import StaleError
from stratagem.common.rpc.channel import open_channel
from stratagem.common.tensors.manifest import Purpose, to_proto
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import peer_pb2, peer_pb2_grpc, types_pb2
from stratagem.worker.mesh import grpc as mesh_grpc
from stratagem.worker.mesh.grpc import form_grpc
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.mailbox import Route
from stratagem.worker.mesh.peers import PeerHub
from tests.common.tensors.chunk_messages import iter_chunks
from tests.every_pair import every_value
from tests.patience import AT_ONCE_S, PATIENCE_S
from tests.worker.mesh.grpc_party import GROUP, formed, grpc_party, hub_on_server
from tests.worker.mesh.late_device import LateDevice

BRIEF_S = 0.2


async def wait(work: Any, timeout_s: float = PATIENCE_S) -> None:
    await asyncio.to_thread(work.wait, timeout_s)


@pytest.mark.parametrize(
    ("count", "dtype"),
    every_value([0, 1, 7, 3_000_000], [torch.float32, torch.bfloat16, torch.float64]),
)
async def test_a_tensor_arrives(count: int, dtype: torch.dtype) -> None:
    sent = torch.randn(count).to(dtype)
    async with grpc_party() as (a, b):
        early, late = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
        posted = b.recv(0, 7, early)
        works = [a.send(1, 7, sent), a.send(1, 8, sent)]
        for work in (posted, *works):
            await wait(work)
        await wait(b.recv(0, 8, late))  # has most likely arrived before
        assert torch.equal(early, sent)
        assert torch.equal(late, sent)
        assert (a.name, a.rank, b.rank, a.size) == ("grpc", 0, 1, 2)


async def test_a_tensor_is_read_when_it_has_reached_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = LateDevice()
    monkeypatch.setattr(mesh_grpc, "to_host", device.to_host)
    sent = [torch.randn(count) for count in (0, 1, 7, 100_003)]
    async with grpc_party() as (a, b):
        works = [a.send(1, tag, tensor) for tag, tensor in enumerate(sent)]
        assert device.num_begun == len(sent)
        for tag, tensor in enumerate(sent):
            received = torch.empty_like(tensor)
            await wait(b.recv(0, tag, received))
            await wait(works[tag])
            assert torch.equal(received, tensor)
    assert threading.get_ident() not in device.waited_in


async def test_a_tensor_for_several_peers_is_copied_to_the_host_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, received = LateDevice(), torch.empty(7)
    monkeypatch.setattr(mesh_grpc, "to_host", device.to_host)
    async with grpc_party(3) as (a, *others):
        tensor = torch.zeros(7)
        for turn in (1, 2):
            tensor.fill_(turn)  # allowed: nothing of it is under way
            works = [a.send(peer, turn, tensor) for peer in (1, 2)]
            assert device.num_begun == turn
            for link in others:
                await wait(link.recv(0, turn, received))
                assert torch.equal(received, torch.full((7,), float(turn)))
            for work in works:
                await wait(work)


async def test_messages_may_come_in_any_order_and_both_ways() -> None:
    async with grpc_party(3) as links:
        received = {}
        works: list[Any] = []
        for link in links:
            for peer in {0, 1, 2} - {link.rank}:
                for tag in (5, 2, 9):
                    tensor = torch.full((1000 * tag,), link.rank * 100.0 + tag)
                    works.append(link.send(peer, tag, tensor))
        for link in links:
            for peer in {0, 1, 2} - {link.rank}:
                for tag in (9, 5, 2):
                    received[link.rank, peer, tag] = torch.empty(1000 * tag)
                    works.append(link.recv(peer, tag, received[link.rank, peer, tag]))
        for work in works:
            await wait(work)
        for (_, peer, tag), tensor in received.items():
            assert torch.equal(tensor, torch.full((1000 * tag,), peer * 100.0 + tag))


async def test_a_tag_can_be_used_again_once_taken() -> None:
    async with grpc_party() as (a, b):
        for turn in range(3):
            target = torch.empty(4)
            a.send(1, 1, torch.full((4,), float(turn)))
            await wait(b.recv(0, 1, target))
            assert target[0] == turn


async def test_more_than_the_window_flows() -> None:
    async with grpc_party() as (a, b):
        sent = [torch.full((1_000_000,), float(tag)) for tag in range(12)]  # 48 MB
        works: list[Any] = [a.send(1, tag, tensor) for tag, tensor in enumerate(sent)]
        targets = [torch.empty(1_000_000) for _ in sent]
        works += [b.recv(0, tag, tensor) for tag, tensor in enumerate(targets)]
        for work in works:
            await wait(work)
        assert all(map(torch.equal, sent, targets))


async def test_deadline_names_what_is_missing() -> None:
    async with grpc_party() as (_, b):
        with pytest.raises(ExchangeError, match=r"tag 3 of step 0 from member 0: nothing within"):
            await wait(b.recv(0, 3, torch.empty(1)), BRIEF_S)


async def test_cut_wakes_all_waiters_at_once_here_and_there() -> None:
    async with grpc_party(3) as links:
        waits = [
            asyncio.create_task(wait(link.recv((link.rank + 1) % 3, 1, torch.empty(5))))
            for link in links
        ]
        started = time.monotonic()
        for _ in range(2):
            await asyncio.to_thread(links[0].cut)
        with pytest.raises(ExchangeError, match="the link was cut"):
            await waits[0]
        with pytest.raises(ExchangeError, match="member 0"):
            await waits[2]  # waited for 0
        assert time.monotonic() - started < AT_ONCE_S
        links[1].cut()  # as the reducer of 2 would have it, via 2's own cut
        with pytest.raises(ExchangeError, match="cut"):
            await waits[1]
        with pytest.raises(ExchangeError, match="cut"):
            links[0].recv(1, 2, torch.empty(1))
        with pytest.raises(ExchangeError, match="cut"):
            await wait(links[0].send(1, 2, torch.empty(1)))


async def test_sends_to_a_member_that_cut_fail() -> None:
    async with grpc_party() as (a, b):
        b.cut()
        works = [a.send(1, tag, torch.zeros(1_000_000)) for tag in range(100)]
        with pytest.raises(ExchangeError, match="left the party"):
            await wait(works[-1])


async def test_nothing_is_written_into_a_tensor_after_the_end() -> None:
    async with grpc_party() as (a, b):
        target = torch.zeros(2_000_000)
        b.recv(0, 1, target)
        a.send(1, 1, torch.ones(2_000_000))
        b.cut()
        state = target.clone()
        with pytest.raises(ExchangeError):
            await wait(a.send(1, 2, torch.ones(2_000_000)))
        assert torch.equal(target, state)


async def test_what_a_member_sent_before_it_left_can_still_be_taken() -> None:
    async with grpc_party() as (a, b):
        sent = torch.randn(3_000_000)
        await wait(a.send(1, 1, sent))
        a.close()
        target = torch.empty(3_000_000)
        await wait(b.recv(0, 1, target))
        assert torch.equal(target, sent)
        with pytest.raises(ExchangeError, match="member 0 has left"):
            await wait(b.recv(0, 2, torch.empty(1)))


async def test_a_new_membership_replaces_the_old_and_refuses_its_messages() -> None:
    async with hub_on_server() as one, hub_on_server() as two:
        old_a, old_b = await formed([one, two], GROUP)
        waiting = asyncio.create_task(wait(old_b.recv(0, 1, torch.empty(1))))
        new_a, new_b = await formed([one, two], replace(GROUP, membership=6))
        with pytest.raises(ExchangeError, match="another membership"):
            await waiting
        target = torch.empty(3)
        new_a.send(1, 1, torch.ones(3))
        await wait(new_b.recv(0, 1, target))
        old_a.close()
        old_b.close()
        with pytest.raises(StaleError, match="older than 6"):
            two.join(replace(GROUP, rank=1))
        code, words = await said(two, [header()])
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "membership 5 of member 1 of run-1/silo0 is older than 6" in words
        target = torch.empty(2)  # the new link has not been harmed
        new_b.send(0, 4, torch.ones(2))
        await wait(new_a.recv(1, 4, target))


async def test_two_members_and_two_runs_in_one_process() -> None:
    async with hub_on_server() as hub:
        links = await formed([hub, hub], GROUP)
        others = await formed([hub, hub], replace(GROUP, run_id="run-2", membership=1))
        for (a, b), value in ((links, 1.0), (others, 2.0)):
            target = torch.zeros(1)
            a.send(1, 1, torch.full((1,), value))
            await wait(b.recv(0, 1, target))
            assert target == value


async def test_a_member_that_cannot_be_reached_is_named() -> None:
    async with hub_on_server() as hub:
        with pytest.raises(ExchangeError, match="member 1"):
            await asyncio.to_thread(
                form_grpc, hub, GROUP, lambda own: [own, b"127.0.0.1:1"], PATIENCE_S
            )
        with pytest.raises(ExchangeError, match="rendezvous gave 1"):
            await asyncio.to_thread(form_grpc, hub, GROUP, lambda own: [own], PATIENCE_S)
        code, _ = await said(hub, [header(destination=0, source=1)])
        assert code is grpc.StatusCode.UNAVAILABLE  # nobody is left at home


# ---- callers that do not keep the rules: stock stubs, no class of ours ----


def header(
    tag: int = 0, tensor: torch.Tensor | None = None, **changes: Any
) -> peer_pb2.SendRequest:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "party": "silo0",
        "source": 0,
        "destination": 1,
    } | changes
    manifest, _ = manifest_of({} if tensor is None else {"t": tensor}, Purpose.MESH)
    membership = fields.pop("membership", 5)
    return peer_pb2.SendRequest(
        header=peer_pb2.PeerHeader(
            fence=types_pb2.Fence(term=1, membership=membership),
            tag=tag,
            manifest=to_proto(manifest),
            **fields,
        )
    )


def message(tag: int, tensor: torch.Tensor) -> list[peer_pb2.SendRequest]:
    _, buffers = manifest_of({"t": tensor}, Purpose.MESH)
    chunks = [peer_pb2.SendRequest(chunk=chunk) for chunk in iter_chunks(buffers)]
    return [header(tag, tensor), *chunks]


async def said(
    hub: PeerHub, requests: list[peer_pb2.SendRequest], num_answers: int = 0
) -> tuple[grpc.StatusCode, str]:
    """How a stream with these requests ends, as the server says it.

    A stock client that is refused in the middle of a write sometimes makes INTERNAL of the
    server's status; then it is asked again.
    """
    for _ in range(20):
        code, words = await said_once(hub, requests, num_answers)
        if not is_the_clients_own(code, words):
            break
    return code, words


def is_the_clients_own(code: grpc.StatusCode, words: str) -> bool:
    return code is grpc.StatusCode.INTERNAL and "from Core" in words


async def said_once(
    hub: PeerHub, requests: list[peer_pb2.SendRequest], num_answers: int
) -> tuple[grpc.StatusCode, str]:
    async with open_channel(hub.address, own_connection=True) as channel:
        call = peer_pb2_grpc.PeerServiceStub(channel).Send(iter(requests))
        answers = []
        try:
            async for answer in call:
                answers.append(answer.num_messages)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        assert answers == list(range(num_answers + 1))
        return grpc.StatusCode.OK, ""


ONE = torch.ones(10)


def flipped() -> list[peer_pb2.SendRequest]:
    bad = message(1, ONE)
    bad[1].chunk.crc32c ^= 1
    return bad


@pytest.mark.parametrize(
    ("requests", "code", "words"),
    [
        (message(1, ONE) + message(1, ONE), "INVALID_ARGUMENT", "tag 1 .* is here already"),
        (message(1, ONE)[1:], "INVALID_ARGUMENT", "must be the header"),
        (message(1, ONE) + message(1, ONE)[1:], "INVALID_ARGUMENT", "begin with its header"),
        (message(1, ONE)[:1], "DATA_LOSS", "ended after 0 bytes"),
        (message(1, ONE)[:1] + message(2, ONE), "DATA_LOSS", "ended after 0 bytes"),
        (flipped(), "DATA_LOSS", "CRC32C"),
        ([header(membership=4)], "FAILED_PRECONDITION", "older than 5"),
        ([header(membership=6)], "UNAVAILABLE", "not here under membership 6"),
        ([header(run_id="run-9")], "UNAVAILABLE", "member 1 of run-9/silo0"),
        ([header(source=1)], "INVALID_ARGUMENT", "no other member"),
        ([header(source=7)], "INVALID_ARGUMENT", "no other member"),
        ([header(), header(source=1)], "INVALID_ARGUMENT", "source: changed"),
        ([header(), header(membership=4)], "INVALID_ARGUMENT", "membership: changed"),
        ([header(3, torch.ones(9))], "INVALID_ARGUMENT", "36 bytes of float32.* expects 40"),
        ([header(3, torch.ones(10).int())], "INVALID_ARGUMENT", "of int32.* float32"),
        (message(9, torch.ones(2000)), "RESOURCE_EXHAUSTED", "early messages: 8000 bytes"),
        ([peer_pb2.SendRequest()], "INVALID_ARGUMENT", "must be the header"),
    ],
)
async def test_streams_that_break_the_rules_are_refused(
    requests: list[peer_pb2.SendRequest], code: str, words: str
) -> None:
    ended = (grpc.StatusCode.INTERNAL, "from Core")
    while is_the_clients_own(*ended):  # a mailbox of its own for each time: it keeps what it saw
        async with hub_on_server(max_early_bytes=4096) as hub:
            endpoint = hub.join(replace(GROUP, rank=1))
            endpoint.box.post(Route(0, 0, 3), torch.zeros(10))
            ended = await said_once(hub, requests, 0)
    assert ended[0].name == code
    assert re.search(words, ended[1]), ended[1]


@pytest.mark.parametrize("is_posted", [True, False])
async def test_a_message_that_breaks_off_leaves_no_trace(is_posted: bool) -> None:
    """The same message is taken when it comes again, and early ones find as much room as before."""
    async with hub_on_server(max_early_bytes=ONE.nbytes) as hub:
        endpoint = hub.join(replace(GROUP, rank=1))
        target, route = torch.zeros(10), Route(0, 0, 1)
        work = endpoint.box.post(route, target) if is_posted else None
        async with open_channel(hub.address, own_connection=True) as channel:
            call: Any = peer_pb2_grpc.PeerServiceStub(channel).Send()
            await call.write(header())  # the member itself, which stays
            await call.read()
            for broken in ([header(), *message(1, ONE)[:1]], [header(), *flipped()]):
                assert (await said(hub, broken))[0] is grpc.StatusCode.DATA_LOSS
            for each in message(1, ONE):
                await call.write(each)
            assert (await call.read()).num_messages == 1
        await wait(work or endpoint.box.post(route, target))
        assert torch.equal(target, ONE)


async def test_unavailable_is_the_answer_of_a_stopping_worker() -> None:
    async with hub_on_server() as hub:
        hub.join(replace(GROUP, rank=1))
        async with open_channel(hub.address) as channel:
            call: Any = peer_pb2_grpc.PeerServiceStub(channel).Send()
            await call.write(header())
            assert (await call.read()).num_messages == 0
            await hub.stop()
            with pytest.raises(grpc.aio.AioRpcError, match="stopping") as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
