"""A federation whose sites join in its first, third and sixth round, leave and return, on real
processes: its bits are those of a loop over the same sites, whoever is killed on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking import Client, RunHandle
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    federated,
    gates_in,
    outcome_of,
    wait_for,
)
from tests.crash.failure_logs import LOGS
from tests.crash.hands import Hands, Process, free_address, hands
from tests.crash.rig import KILLED_BY_FAILPOINT, until
from tests.jobs import user_data
from tests.patience import PATIENCE_S
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.promise("Sites join, leave and return whatever dies on the way.")

TAKEN_PART = {1: [0], 2: [0], 3: [0, 1], 4: [0, 1], 5: [0], 6: [0, 2], 7: [0, 1, 2], 8: [0, 1, 2]}
"""Round -> the clients that its model is made of."""
BEFORE, AFTER = "coordinator.journal.before_commit", "coordinator.journal.after_commit"


@dataclass(slots=True)
class Federation:
    """Sites w0, w1, w2 of a federation. w0 is always there, and stands at a gate in each round."""

    started: Hands
    gates: Gates
    coordinator: Process
    client: Client
    crash: tuple[int, str]
    """A round, and the failpoint at which the coordinator dies when the next round opens."""

    def come(self, name: str) -> Process:
        """Start a site, and wait until it is registered."""
        worker = self.started.worker(name, self.coordinator.address)
        assert worker.address
        until(lambda: name in self.alive(), f"{name} is registered")
        return worker

    def alive(self) -> set[str]:
        return {worker.worker_id for worker in self.client.workers() if worker.is_alive}

    def close(self, run: RunHandle, round_num: int) -> None:
        """Let a round end, and wait for the one after it."""
        self.gates.wait_reached(f"client0-{round_num}")
        if self.crash[0] != round_num:
            self.gates.open(f"client0-{round_num}")
        else:
            self.die(f"client0-{round_num}", self.crash[1])
        wait_for(run, "SegmentCommitted", round_num)

    def die(self, gate: str, failpoint: str) -> None:
        """Open a gate, and start the coordinator again when it has died at the failpoint: with the
        second commit from now, that of the next state and of who takes part in the next round."""
        address = self.coordinator.address
        armed = self.started.folder / "failpoints" / failpoint
        armed.write_text("1")
        self.gates.open(gate)
        assert self.coordinator.popen.wait(PATIENCE_S) == KILLED_BY_FAILPOINT
        assert not armed.exists()
        self.coordinator = self.started.coordinator("hub", listen=address)
        assert self.coordinator.address == address


@contextmanager
def federation(folder: Path, crash: tuple[int, str]) -> Iterator[Federation]:
    (folder / "gates").mkdir()
    (folder / "failpoints").mkdir()
    with hands(folder) as started, gates_in(folder / "gates") as gates:
        started.environment_of = lambda name: (
            {"STRATAGEM_FAILPOINTS": str(folder / "failpoints")} if name == "hub" else {}
        )
        hub = started.coordinator("hub", listen=free_address())
        with Client(hub.address) as client:
            yield Federation(started, gates, hub, client, crash)


@pytest.mark.parametrize(
    "crash",
    [
        pytest.param((2, AFTER), id="a site has joined", marks=pytest.mark.sweep),
        pytest.param((2, BEFORE), id="a site would join", marks=pytest.mark.soak),
        pytest.param((4, BEFORE), id="a site would leave", marks=pytest.mark.sweep),
        pytest.param((4, AFTER), id="a site has left", marks=pytest.mark.soak),
        pytest.param((6, BEFORE), id="a site would be back", marks=pytest.mark.soak),
        pytest.param((6, AFTER), id="a site is back", marks=pytest.mark.soak),
    ],
)
def test_sites_that_join_leave_and_return_change_only_who_counts(
    tmp_path: Path, crash: tuple[int, str], request: pytest.FixtureRequest
) -> None:
    spec = federated(
        "dropout_mlp",
        num_clients=4,
        rounds=8,
        batch_size=64,
        data=user_data("gated_clients", folder=str(tmp_path / "gates")),
        options={"roster": {"open": True, "min_clients": 1, "wait_s": 600.0}},
    )
    with federation(tmp_path, crash) as sites:
        request.node.stash[LOGS] = sites.started.logs
        sites.gates.close(*(f"client0-{number}" for number in TAKEN_PART), "client2-2")
        run = sites.client.submit(spec)
        wait_for(run, "RoundWaits")
        assert run.status().reason == "0 of 1 clients"
        sites.come("w0")
        sites.close(run, 1)
        sites.gates.wait_reached("client0-2")
        second = sites.come("w1")
        sites.close(run, 2)
        sites.close(run, 3)
        wait_for(run, "UpdateReceived", 2, where=lambda e: e.payload["client"] == 1)
        second.popen.terminate()
        second.popen.wait(PATIENCE_S)
        until(lambda: "w1" not in sites.alive(), "w1 has left")
        sites.close(run, 4)
        sites.gates.wait_reached("client0-5")
        third = sites.come("w2")
        sites.close(run, 5)
        sites.gates.wait_reached("client0-6")
        sites.come("w1")
        sites.close(run, 6)
        sites.gates.wait_reached("client2-2")
        third.kill()
        sites.gates.open("client2-2")  # it would stand there again, as its process counts anew
        sites.come("w2")
        sites.close(run, 7)
        sites.close(run, 8)
        outcome = outcome_of(run)
    joined = [event.payload["clients"] for event in outcome.of("ClientsJoined")]
    assert [[(c["client"], c["worker_id"]) for c in clients] for clients in joined] == [
        [(0, "w0")], [(1, "w1")], [(2, "w2")], [(1, "w1")],
    ]  # fmt: skip
    assert [event.payload["client"] for event in outcome.of("ClientLeft")] == [1]
    closed = {e.payload["round_num"]: e.payload["accepted"] for e in outcome.of("RoundClosed")}
    assert {n: [each["client"] for each in who] for n, who in closed.items()} == TAKEN_PART
    assert not outcome.status.reproducible
    expected = federated_loop(spec, ALLOWED, TAKEN_PART.__getitem__)
    assert_same_bits(outcome.state, expected.state)
