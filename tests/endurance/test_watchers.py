"""Watchers that do not read: what thousands of events cost while nobody takes them."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from benchmarks.replay import BATCH, long_run
from benchmarks.soak import status_of
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.fact_text import encode
from stratagem.coordinator.core.facts import RunCompleted, RunReleased
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.common.observe.scrape import labelled, scrape_from_outside
from tests.crash.hands import Process, hands
from tests.crash.jobs import LOCAL, Job, crash_job
from tests.crash.rig import events_of, outcome_of, until
from tests.golden.replay import FOLDER, load
from tests.hostile.attack import PROTOCOL

pytestmark = [
    pytest.mark.soak,
    pytest.mark.promise("Watchers that do not read cost little and miss nothing."),
]

NUM_WATCHERS, NUM_ROUNDS = 20, 400
MAX_KB_EACH = 300
"""Of a watcher: a page of events as they are decoded, and what gRPC has in flight."""
LIVE: Job = crash_job(LOCAL)
ALL = pb.WatchRunRequest(run_id="long")
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**14))
"""Else gRPC takes in a megabyte and more by itself."""


def with_a_long_run(folder: Path) -> int:
    """A journal with a run of many rounds that has ended; how many facts it has."""
    golden = load(FOLDER / "0.1.0.sql", folder / "golden.sqlite")
    run = [each.record for each in golden.read(RunId("golden-fedavg"))]
    golden.close()
    (folder / "data").mkdir(mode=0o700)
    journal = Journal.open(str(folder / "data" / "journal.sqlite"))
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    records = list(long_run(run, "long", NUM_ROUNDS))
    for fact in (RunCompleted(reason="it was long"), RunReleased()):
        kind, payload = encode(fact)
        last = records[-1]
        records.append(replace(last, seq=last.seq + 1, kind=kind, payload=payload))
    for start in range(0, len(records), BATCH):
        journal.append(lead.term, records[start : start + BATCH])
    journal.release(lead.term)
    journal.close()
    return len(records)


def num_open(process: Process) -> float:
    """Streams of watchers that the coordinator holds."""
    address = json.loads(process.ready_file.read_text())["metrics_address"]
    open_calls = scrape_from_outside(address)["stratagem_rpc_open"]
    return open_calls[labelled(method="CoordinatorService/WatchRun")]


async def rest_of(call: Any) -> list[int]:
    """The indices of all events that are still to come."""
    return [message.event.index async for message in call if message.HasField("event")]


async def read_by_another(address: str) -> list[int]:
    """The indices of all events of the long run, as one gets them who reads."""
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        return await rest_of(CoordinatorServiceStub(channel).WatchRun(ALL, metadata=PROTOCOL))


def live_run(address: str) -> Mapping[tuple[str, int], str]:
    """The digests of a run's commits, after all of its events have been seen in order."""
    with Client(address) as client:
        run = client.submit(LIVE)
        digests = outcome_of(run).digests
        indices = [event.index for event in events_of(run)]
        assert indices == list(range(len(indices)))
        return digests


async def test_watchers_that_do_not_read_cost_little_and_miss_nothing(tmp_path: Path) -> None:
    num_facts = with_a_long_run(tmp_path)
    assert num_facts > 3000
    with hands(tmp_path, "--metrics-port", "0") as started:
        process = started.coordinator("coordinator")
        address, pid = process.address, process.popen.pid
        assert started.worker("w0", address).address
        expected = await asyncio.to_thread(live_run, address)
        # What one who reads costs is no cost of those who do not.
        assert await read_by_another(address) == list(range(num_facts))
        before_kb = status_of(pid)["RssAnon"]
        async with AsyncExitStack() as stack:
            calls = []
            for _ in range(NUM_WATCHERS):
                channel = grpc.aio.insecure_channel(address, options=SMALL_WINDOW)
                stub = CoordinatorServiceStub(await stack.enter_async_context(channel))
                calls.append(stub.WatchRun(ALL, metadata=PROTOCOL))
                assert (await anext(aiter(calls[-1]))).event.index == 0
            # While one gets all of it, the others would, too, if they were not held up.
            assert await read_by_another(address) == list(range(num_facts))
            each_kb = (status_of(pid)["RssAnon"] - before_kb) / NUM_WATCHERS
            print(f"{each_kb:.0f} KB per watcher")
            assert each_kb < MAX_KB_EACH
            # A run that trains meanwhile, and who watches it, notice nothing.
            assert await asyncio.to_thread(live_run, address) == expected
            assert num_open(process) == NUM_WATCHERS
            # Those who begin to read, now or again, have all of it; who leaves is forgotten.
            assert await rest_of(calls[0]) == list(range(1, num_facts))
            calls[1].cancel()
            what = "the places of two are free"
            await asyncio.to_thread(until, lambda: num_open(process) == NUM_WATCHERS - 2, what)
            later = pb.WatchRunRequest(run_id="long", from_index=1000)
            again = stub.WatchRun(later, metadata=PROTOCOL)
            assert await rest_of(again) == list(range(1000, num_facts))
        assert not process.has_ended
        assert "Traceback" not in process.log_file.read_text()
