"""A pipeline of real processes over PeerService: the bits of one process, and a lost stage."""

from multiprocessing.connection import Connection

import pytest
import torch

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.build import Placement, Seat, build_stage_runner
from stratagem.worker.pipeline.peer_transport import PeerTransport
from stratagem.worker.reference.loops import sharded_loop
from tests.exchange.party import introduce, party
from tests.pipeline.support import ADAM, ALLOWED, BRANCHES, cut, job
from tests.stream.test_peer_processes import form, hub_in_a_thread

DEEP = [str(i) for i in range(8)]
CASES = {
    "deep": (job(optimizer=ADAM), Placement(cut(DEEP, 3, 5), (0, 1), 2)),
    "interleaved": (job(optimizer=ADAM), Placement(cut(DEEP, 2, 2, 2, 2), (0, 1, 0, 1), 2)),
    "branches": (
        job({"graph": BRANCHES}, loss="tests.pipeline.userland:two_heads"),
        Placement((("a", "norm"), ("left",), ("right",)), (0, 1, 2), 4, "eager"),
    ),
}


def train_steps(pipe: Connection, rank: int, size: int, case: str) -> None:
    torch.set_num_threads(1)
    spec, placement = CASES[case]
    with hub_in_a_thread() as hub:
        transport = PeerTransport(form(hub, pipe, rank, size))
        seat = Seat(rank, transport, 30.0)
        runner = build_stage_runner(spec, ALLOWED, placement, seat, fresh=True)
        losses = [runner.train_step().loss for _ in range(5)]
        pipe.send((losses, runner.evaluate("test"), runner.fingerprint()))
        state = {name: each.tolist() for name, each in runner.state()[0].items()}
        pipe.send(state)
        pipe.recv()


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_processes_compute_the_bits_of_one(case: str) -> None:
    spec, placement = CASES[case]
    torch.set_num_threads(1)
    expected = sharded_loop(spec, ALLOWED, 1, 5, micro_batch_size=placement.micro_batch_size)
    with party(train_steps, max(placement.ranks) + 1, case) as members:
        introduce(members)
        told = [member.receive() for member in members]
        states = [member.receive() for member in members]
    assert all(losses == expected.losses for losses, *_ in told)
    assert [bool(parts) for _, parts, _ in told] == [False] * (len(members) - 1) + [True]
    merged = {name: values for state in states for name, values in state.items()}
    assert {name: values for name, values in merged.items() if name.startswith("model/")} == {
        f"model/{name}": each.tolist() for name, each in expected.state.items()
    }


def train_until_lost(pipe: Connection, rank: int, size: int) -> None:
    spec, placement = CASES["deep"]
    with hub_in_a_thread() as hub:
        transport = PeerTransport(form(hub, pipe, rank, size))
        runner = build_stage_runner(
            spec, ALLOWED, placement, Seat(rank, transport, 30.0), fresh=True
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


def test_a_killed_stage_is_seen_and_the_step_leaves_no_trace() -> None:
    with party(train_until_lost, 2) as members:
        introduce(members)
        assert [member.receive() for member in members] == [1, 1]
        members[1].kill()
        words, is_unchanged, step = members[0].receive()
    assert "from member 1" in words
    assert is_unchanged
    assert step == 1
