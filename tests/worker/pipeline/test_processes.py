"""A pipeline of real processes: the bits of one process, and a lost stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.shm import SharedListener, connect
from stratagem.worker.mesh.shm_messages import SlotLink
from stratagem.worker.pipeline.build import RankEndpoint, StageAssignment, build_stage_runner
from stratagem.worker.pipeline.messages import PeerTransport
from tests.every_pair import every_value
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.worker.mesh.engines import grpc_link_over, hub_in_a_thread
from tests.worker.mesh.party import introduce, party, rendezvous_over
from tests.worker.pipeline.graphs import BRANCHES
from tests.worker.pipeline.support import ADAM, ALLOWED, cut, deep_job

DEEP = [str(i) for i in range(8)]
CASES = {
    "deep": (deep_job(optimizer=ADAM), StageAssignment(cut(DEEP, 3, 5), (0, 1), 2)),
    "interleaved": (
        deep_job(optimizer=ADAM),
        StageAssignment(cut(DEEP, 2, 2, 2, 2), (0, 1, 0, 1), 2),
    ),
    "branches": (
        deep_job({"graph": BRANCHES}, loss="tests.userland.losses:two_heads"),
        StageAssignment((("a", "norm"), ("left",), ("right",)), (0, 1, 2), 4, "eager"),
    ),
}


@contextmanager
def transport_over(engine: str, pipe: Connection, rank: int, size: int) -> Iterator[PeerTransport]:
    if engine == "shm":
        listener = SharedListener()
        addresses = rendezvous_over(pipe)(listener.address)
        yield PeerTransport(
            SlotLink(rank, size, connect(listener, rank, size, addresses, PATIENCE_S))
        )
        return
    with hub_in_a_thread() as hub:
        yield PeerTransport(grpc_link_over(hub, pipe, rank, size))


def train_steps(pipe: Connection, rank: int, size: int, case: str, engine: str) -> None:
    torch.set_num_threads(1)
    spec, placement = CASES[case]
    with transport_over(engine, pipe, rank, size) as transport:
        seat = RankEndpoint(rank, transport, PATIENCE_S)
        runner = build_stage_runner(spec, ALLOWED, placement, seat, fresh=True)
        losses = [runner.train_step().loss for _ in range(5)]
        pipe.send((losses, runner.evaluate_split("test"), runner.fingerprint()))
        state = {name: each.tolist() for name, each in runner.state()[0].items()}
        pipe.send(state)
        pipe.recv()


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "engine"), every_value(list(CASES), ["shm", "grpc"]))
def test_processes_compute_the_bits_of_one(case: str, engine: str) -> None:
    spec, placement = CASES[case]
    expected = sharded_loop(spec, ALLOWED, 1, 5, micro_batch_size=placement.micro_batch_size)
    with party(train_steps, max(placement.ranks) + 1, case, engine) as members:
        introduce(members)
        told = [member.receive() for member in members]
        states = [member.receive() for member in members]
    assert all(losses == expected.losses for losses, *_ in told)
    assert [bool(parts) for _, parts, _ in told] == [False] * (len(members) - 1) + [True]
    merged = {name: values for state in states for name, values in state.items()}
    assert {name: values for name, values in merged.items() if name.startswith("model/")} == {
        f"model/{name}": each.tolist() for name, each in expected.state.items()
    }


def train_until_lost(pipe: Connection, rank: int, size: int, engine: str) -> None:
    spec, placement = CASES["deep"]
    with transport_over(engine, pipe, rank, size) as transport:
        runner = build_stage_runner(
            spec, ALLOWED, placement, RankEndpoint(rank, transport, PATIENCE_S), fresh=True
        )
        pipe.send(runner.train_step().step)
        if rank == 1:
            pipe.recv()  # never comes
        before = runner.fingerprint()
        try:
            runner.train_step()
        except ExchangeError as error:
            pipe.send((str(error), runner.fingerprint() == before, runner.step))
        pipe.recv()


@pytest.mark.sweep  # test_messages has a stage that leaves
def test_a_killed_stage_is_seen_and_the_step_leaves_no_trace() -> None:
    with party(train_until_lost, 2, "shm") as members:
        introduce(members)
        assert [member.receive() for member in members] == [1, 1]
        members[1].kill()
        words, is_unchanged, step = members[0].receive()
    assert "from member 1" in words
    assert is_unchanged
    assert step == 1
