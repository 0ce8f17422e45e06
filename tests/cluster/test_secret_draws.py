"""A secret draw stays secret: what readers of a run get is looked at, byte by byte."""

import re
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.privacy import accountant
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc
from tests.cluster.jobs import Gates, federated, outcome_of
from tests.jobs import user_data
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("no reader of a run learns who was drawn in secret"),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

NUM_CLIENTS, ROUNDS = 6, 3
HIDDEN = ("ClientsSelected", "ClientsAssigned", "UpdateReceived", "UpdateRejected")
TELLS = re.compile(r"\bclients? \d|\d of \d+ |KeyError|" + "|".join(HIDDEN))
VERSION = ("stratagem-protocol", "1")
OF_A_ROUND = ["RoundAccounted", "RoundClosed", "SegmentCommitted"]


class Asking:
    """Calls of the coordinator as they are, and not as a library has read them."""

    def __init__(self, channel: grpc.Channel, run_id: str) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self._run_id = run_id

    def once(self, call: str, request: Any) -> Any:
        return getattr(self._stub, call)(request, metadata=(VERSION,), timeout=PATIENCE_S)

    def all(self, call: str, request: Any) -> list[Any]:
        request.run_id = self._run_id
        return [*self.once(call, request)]

    def replies(self) -> dict[str, str]:
        """What each call answers of the run at this moment, as text of all its fields."""
        listed = self.once("ListRuns", pb.ListRunsRequest()).runs
        workers = self.once("ListWorkers", pb.ListWorkersRequest()).workers
        watched = self.once("WatchRuns", pb.WatchRunsRequest())
        briefs = next(watched).runs
        watched.cancel()
        every: dict[str, list[Any]] = {
            "get": [self.once("GetRun", pb.GetRunRequest(run_id=self._run_id))],
            "list": [run for run in listed if run.run_id == self._run_id],
            "briefs": [run for run in briefs if run.run_id == self._run_id],
            "watch": self.all("WatchRun", pb.WatchRunRequest(follow=False)),
            "newest": self.all("WatchRun", pb.WatchRunRequest(newest_first=True)),
            "logs": self.all("TailLogs", pb.TailLogsRequest()),
            "history": self.all("GetHistory", pb.GetHistoryRequest(parties=["*"])),
            "workers": [worker for worker in workers if self._run_id in worker.run_ids],
        }
        return {name: "\n".join(map(str, messages)) for name, messages in every.items()}


def wait_held(folder: Path) -> None:
    """Until one of those who were drawn has its first batch."""
    deadline_s, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not [*folder.glob("*.reached")]:
        assert time.monotonic() < deadline_s, "nobody was drawn"
        pause.wait(0.05)


def journaled(cluster: LocalCluster, run_id: str) -> list[tuple[str, str]]:
    """Kind and payload of each fact of a run, as the operator can read them."""
    path = cluster.folder / "coordinator" / "journal.sqlite"
    with closing(sqlite3.connect(path)) as journal:
        asked = "SELECT kind, payload FROM event WHERE run_id = ? ORDER BY seq"
        return list(journal.execute(asked, [run_id]))


def test_no_reader_learns_who_was_drawn(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    names = [f"client{number}-1" for number in range(NUM_CLIENTS)]
    gates.close(*names)
    failing = {"failing": [0, 1, 2], "how": "raise", "rounds": [1, 2, 3]}
    spec = federated(
        num_clients=NUM_CLIENTS,
        rounds=ROUNDS,
        selection={"method": "Random", "fraction": 0.5},
        data=user_data("failing_clients", folder=str(gates.folder), **failing),
        privacy={"clip": {"norm": 0.5}, "noise_multiplier": 2.0, "target": {"delta": 1e-5}},
    )
    run = client.submit(spec)
    with grpc.insecure_channel(exact_cluster.address) as channel:
        asking = Asking(channel, run.run_id)
        wait_held(gates.folder)
        told = {f"open {name}": text for name, text in asking.replies().items()}
        gates.open()
        outcome = outcome_of(run)
        told |= asking.replies()
        middle = pb.WatchRunRequest(from_index=5, before_index=9)
        indices = [message.event.index for message in asking.all("WatchRun", middle)]
    told["sdk"] = "\n".join(map(str, run.watch()))
    report = run.report(gates.folder / "report.html").read_text()
    assert not [kind for kind in HIDDEN if kind in report]
    lines = exact_cluster.log_tail("coordinator").splitlines()
    told["process"] = "\n".join(line for line in lines if run.run_id in line)

    facts = journaled(exact_cluster, run.run_id)
    in_journal = {kind for kind, _ in facts}
    assert {"ClientsSelected", "UpdateReceived"} & in_journal  # the operator sees them
    for where, text in told.items():
        found = TELLS.search(text)
        assert found is None, (where, text[max(0, found.start() - 200) : found.end() + 200])
    assert not told["workers"]
    assert not told["open workers"]
    kinds = [event.kind for event in outcome.events]
    assert kinds[-1 - 3 * ROUNDS :] in (
        [*OF_A_ROUND * ROUNDS, "RunCompleted"],
        [*(OF_A_ROUND * ROUNDS)[1:], "RunCompleted", "RunReleased"],
    )
    assert [event.index for event in outcome.events] == list(range(len(kinds)))
    assert indices == [5, 6, 7, 8]
    assert run.status().event_index >= len(kinds) - 1
    assert len(facts) > len(kinds)
    told_logs = [line for line in run.logs() if line.worker_id]
    assert not told_logs
    assert not any(e.payload["drawn"] for e in outcome.of("RoundAccounted"))
    assert not any(e.payload["accepted"] for e in outcome.of("RoundClosed"))
