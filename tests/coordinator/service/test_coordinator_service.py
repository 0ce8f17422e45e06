"""The coordinator's gRPC face over a real server, with a worker that only says who it is."""

import asyncio
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from stratagem.common.base.ids import Incarnation, RunId, WorkerId
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.streams import has_begun
from stratagem.common.rpc.tensor_transfer import push
from stratagem.common.tensors.files import blob_digest, header_bytes
from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import RegisterWorker
from stratagem.coordinator.core.facts import Capability, Member
from stratagem.coordinator.observe.feed import SegmentProgress
from stratagem.coordinator.service import queries
from stratagem.coordinator.store.journal import Journal
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator.open_gate import entrance, leading
from tests.coordinator.service.serving import coordinator, first_of, refused, served, submit, worker
from tests.coordinator.store.places import put
from tests.patience import PATIENCE_S
from tests.settings import coordinator_settings

Code = grpc.StatusCode


async def test_submit_is_idempotent_and_names_every_wrong_field(tmp_path: Path) -> None:
    """What is stored of a run bears a name of its submission: the id may have been another run's,
    that was deleted."""
    async with coordinator(tmp_path) as stub:
        assert (await stub.SubmitRun(submit())).created
        assert not (await stub.SubmitRun(submit())).created
        assert (await refused(stub.SubmitRun(submit(seed=5))))[0] is Code.ALREADY_EXISTS
        code, reason = await refused(stub.SubmitRun(submit("r-2", batch_size=0, epochs=-1)))
        assert code is Code.INVALID_ARGUMENT
        assert "batch_size" in reason
        assert "epochs" in reason
        assert (await refused(stub.SubmitRun(submit("Bad Id"))))[0] is Code.INVALID_ARGUMENT
        assert [run.run_id for run in (await stub.ListRuns(pb.ListRunsRequest())).runs] == ["r-1"]
        await stub.SubmitRun(submit("r-2"))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal:
        found = journal.execute("SELECT payload FROM event WHERE kind = 'RunSubmitted'").fetchall()
    names = {json.loads(payload)["submission"] for (payload,) in found}
    assert len(names) == 2
    assert all(names)


async def test_a_coordinator_that_may_no_longer_write_answers_what_it_was_asked(
    tmp_path: Path,
) -> None:
    """Those whose command was in its hands, those behind them, and those that come later."""
    async with coordinator(tmp_path) as stub:
        other = Journal.open(tmp_path / "journal.sqlite")
        other.release(1)
        other.close()
        async with asyncio.timeout(PATIENCE_S):
            asked = [refused(stub.SubmitRun(submit(f"r-{number}"))) for number in range(3)]
            answers = [*await asyncio.gather(*asked), await refused(stub.SubmitRun(submit("r-9")))]
    assert {code for code, _ in answers} == {Code.UNAVAILABLE}
    assert all("this process ends" in reason for _, reason in answers)


async def test_a_transfer_that_was_stopped_is_begun_anew(tmp_path: Path) -> None:
    """Whoever asks right after the end of a run must not wait for what has been cancelled."""
    silent = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    member, run_id = Member(worker_id=WorkerId("w0"), incarnation=Incarnation("one")), RunId("r-1")
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    manifest = build_manifest([("x", "float32", (1,))], Purpose.STATE)
    async with leading(tmp_path) as app:
        await app.loop.submit(RegisterWorker(member, address, Capability(numerics_rules=CURRENT)))
        digest = put(app.blobs, header_bytes(manifest) + bytes(4))
        first = app.env.transfers.start_push(member, run_id, digest)
        assert app.env.transfers.start_push(member, run_id, digest) is first
        app.env.forget(run_id)
        second = app.env.transfers.start_push(member, run_id, digest)
        assert second is not first
        await asyncio.gather(first, return_exceptions=True)
        assert list(app.env.transfers.pushes.values()) == [second]
        app.env.forget(run_id)
    await asyncio.gather(second, return_exceptions=True)
    silent.close()


async def test_limits_are_named(tmp_path: Path) -> None:
    async with coordinator(tmp_path, max_job_bytes=100, max_active_runs=1) as stub:
        code, reason = await refused(stub.SubmitRun(submit()))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "the limit is 100" in reason
    async with coordinator(tmp_path, max_active_runs=1) as stub:
        await stub.SubmitRun(submit())
        code, reason = await refused(stub.SubmitRun(submit("r-2")))
        assert code is Code.RESOURCE_EXHAUSTED
        assert reason == "1 runs are active, the limit is 1"


async def test_unknown_runs_are_not_found_nor_is_a_stale_rendezvous(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub:
        session = types_pb2.SessionRef(run_id="r-1")
        fence = types_pb2.Fence(term=1, membership=3)
        stale = stub.Rendezvous(pb.RendezvousRequest(fence=fence, session=session))
        assert (await refused(stale))[0] is Code.FAILED_PRECONDITION
        await stub.Suspect(pb.SuspectRequest(fence=fence, session=session, reason="gone"))
        for call in (
            stub.GetRun(pb.GetRunRequest(run_id="nope")),
            stub.CancelRun(pb.CancelRunRequest(run_id="nope")),
            stub.ResumeRun(pb.ResumeRunRequest(run_id="nope")),
            stub.DeleteRun(pb.DeleteRunRequest(run_id="nope")),
            first_of(stub.WatchRun(pb.WatchRunRequest(run_id="nope"))),
            first_of(stub.TailLogs(pb.TailLogsRequest(run_id="nope"))),
            first_of(stub.GetHistory(pb.GetHistoryRequest(run_id="nope"))),
            first_of(stub.DownloadState(pb.DownloadStateRequest(run_id="nope"))),
        ):
            assert await refused(call) == (Code.NOT_FOUND, "run 'nope' is not known")


async def test_life_without_workers_survives_restarts(tmp_path: Path) -> None:
    run: dict[str, Any] = {"run_id": "r-1"}
    waits = "waiting for 1 of 1 workers: no worker is registered"
    async with coordinator(tmp_path) as stub:
        await stub.SubmitRun(submit())
        info = (await stub.GetRun(pb.GetRunRequest(**run))).run
        assert (info.phase, info.reason) == (pb.RUN_PHASE_PLACING, waits)
        code, reason = await refused(stub.ResumeRun(pb.ResumeRunRequest(**run)))
        assert code is Code.FAILED_PRECONDITION
        assert "run 'r-1' is active: it goes on by itself; stop it first" in reason
        watching = asyncio.create_task(_kinds(stub.WatchRun(pb.WatchRunRequest(**run))))
        await stub.CancelRun(pb.CancelRunRequest(**run))
        assert await watching == ["RunSubmitted", "RunCancelled"]
        before = await stub.GetRun(pb.GetRunRequest(**run))
        assert before.run.phase == pb.RUN_PHASE_CANCELLED
        assert before.run.reason == "stopped by request; nothing was committed"
    async with coordinator(tmp_path) as stub:
        assert await stub.GetRun(pb.GetRunRequest(**run)) == before
        assert list((await stub.ListRuns(pb.ListRunsRequest())).runs) == [before.run]
        events = [m.event async for m in stub.WatchRun(pb.WatchRunRequest(**run))]
        assert [(e.index, e.kind) for e in events] == [(0, "RunSubmitted"), (1, "RunCancelled")]
        later = stub.WatchRun(pb.WatchRunRequest(**run, from_index=1))
        assert [m.event.index async for m in later] == [1]
        beyond = stub.WatchRun(pb.WatchRunRequest(**run, from_index=3))
        assert (await refused(first_of(beyond)))[0] is Code.OUT_OF_RANGE
        lines = [line.text async for line in stub.TailLogs(pb.TailLogsRequest(**run))]
        assert lines[0] == "submitted"
        assert not (await stub.SubmitRun(submit())).created
        said = await refused(stub.SubmitRun(submit(seed=5)))
        assert said == (Code.ALREADY_EXISTS, "run 'r-1' exists with another job")
        said = await refused(first_of(stub.DownloadState(pb.DownloadStateRequest(**run))))
        assert said == (Code.NOT_FOUND, "run 'r-1' has committed nothing yet")
        await stub.CancelRun(pb.CancelRunRequest(**run))
        await stub.ResumeRun(pb.ResumeRunRequest(**run))
        info = (await stub.GetRun(pb.GetRunRequest(**run))).run
        assert (info.phase, info.event_index) == (pb.RUN_PHASE_PLACING, 2)
        assert info.reason == waits
        watching = asyncio.create_task(_kinds(stub.WatchRun(pb.WatchRunRequest(**run))))
        await stub.CancelRun(pb.CancelRunRequest(**run))
        assert await watching == ["RunSubmitted", "RunCancelled", "RunResumed", "RunCancelled"]
        await stub.DeleteRun(pb.DeleteRunRequest(**run))
        assert (await refused(stub.GetRun(pb.GetRunRequest(**run))))[0] is Code.NOT_FOUND
        assert not (await stub.ListRuns(pb.ListRunsRequest())).runs
    async with coordinator(tmp_path) as stub:
        assert not (await stub.ListRuns(pb.ListRunsRequest())).runs
        assert (await stub.SubmitRun(submit(seed=5))).created


async def test_who_follows_a_run_without_news_learns_that_it_is_followed(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub:
        await stub.SubmitRun(submit())
        for stream in (
            stub.WatchRun(pb.WatchRunRequest(run_id="r-1", from_index=1)),
            stub.TailLogs(pb.TailLogsRequest(run_id="r-1", from_line=1000, follow=True)),
        ):
            async with asyncio.timeout(PATIENCE_S):
                assert has_begun(await stream.initial_metadata())
            stream.cancel()


async def test_the_status_and_the_watchers_of_a_run_count_the_same_steps(tmp_path: Path) -> None:
    """Also while a worker stays at the step after them."""
    async with served(tmp_path) as (app, address), open_channel(address) as channel:
        stub = CoordinatorServiceStub(channel)
        await stub.SubmitRun(submit())
        app.feed.set_progress(RunId("r-1"), SegmentProgress(step=3))
        app.feed.set_stall(RunId("r-1"), "w has been at training step 4")
        for run in (
            (await stub.GetRun(pb.GetRunRequest(run_id="r-1"))).run,
            *(await stub.ListRuns(pb.ListRunsRequest())).runs,
        ):
            assert (run.step, run.reason) == (3, "w has been at training step 4")
        stream = stub.WatchRun(pb.WatchRunRequest(run_id="r-1", from_index=1))
        async with asyncio.timeout(PATIENCE_S):
            async for item in stream:
                if item.HasField("progress"):
                    break
        assert (item.progress.step, item.progress.reason) == (3, run.reason)
        stream.cancel()


async def test_events_are_asked_for_by_kind_and_by_the_page(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub:
        await stub.SubmitRun(submit())
        for _ in range(3):
            await stub.CancelRun(pb.CancelRunRequest(run_id="r-1"))
            await stub.ResumeRun(pb.ResumeRunRequest(run_id="r-1"))

        def ask(**how: Any) -> Any:
            return stub.WatchRun(pb.WatchRunRequest(run_id="r-1", **how))

        async def events(**how: Any) -> list[Any]:
            return [item.event async for item in ask(**how)]

        so_far = await events(follow=False)
        assert [event.index for event in so_far] == list(range(7))
        times = [event.leader_s for event in so_far]
        assert times == sorted(times)
        assert times[0] > 0
        cancelled = await events(kinds=["RunCancelled"], follow=False)
        assert [event.index for event in cancelled] == [1, 3, 5]
        newest = await events(newest_first=True, limit=3)
        assert newest == so_far[:-4:-1]
        older = await events(newest_first=True, limit=3, before_index=newest[-1].index)
        assert older == so_far[3:0:-1]
        assert await events(before_index=2) == so_far[:2]
        assert await events(newest_first=True, from_index=5) == so_far[:4:-1]
        both = await events(newest_first=True, kinds=["RunResumed", "RunSubmitted"])
        assert [event.index for event in both] == [6, 4, 2, 0]
        assert await events(limit=2) == so_far[:2], "it ends although the run goes on"
        [all_at_once] = [item async for item in ask(follow=False, several=True)]
        assert [all_at_once.event, *all_at_once.more] == so_far
        [some] = [item async for item in ask(newest_first=True, limit=3, several=True)]
        assert [some.event, *some.more] == newest
        assert [item async for item in ask(from_index=7, follow=False, several=True)] == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stratagem.coordinator.service.queries.MAX_EVENTS", 3)
            parts = [item async for item in ask(follow=False, several=True)]
        assert [len(part.more) for part in parts] == [2, 2, 0]
        assert [each for part in parts for each in (part.event, *part.more)] == so_far
        for how in ({"newest_first": True, "follow": True}, {"kinds": ["RunCanceled"]}):
            code, reason = await refused(first_of(ask(**how)))
            assert (code, reason.partition(":")[0]) == (
                Code.INVALID_ARGUMENT,
                "kinds" if "kinds" in how else "follow",
            )
        watching = asyncio.create_task(events(kinds=["RunCancelled"]))
        await stub.CancelRun(pb.CancelRunRequest(run_id="r-1"))
        assert [event.index for event in await watching if event.kind] == [1, 3, 5, 7]
        lines = [line async for line in stub.TailLogs(pb.TailLogsRequest(run_id="r-1"))]
        assert [line.line for line in lines] == list(range(len(lines)))
        last = pb.TailLogsRequest(run_id="r-1", from_line=-2)
        assert [line async for line in stub.TailLogs(last)] == lines[-2:]


async def test_a_pinned_run_says_so_and_is_not_deleted(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub:
        for name, pinned in (("r-1", True), ("r-2", False)):
            await stub.SubmitRun(submit(name))
            await stub.CancelRun(pb.CancelRunRequest(run_id=name))
            await stub.PinRun(pb.PinRunRequest(run_id=name, pinned=pinned))
        runs = (await stub.ListRuns(pb.ListRunsRequest())).runs
        assert {run.run_id: run.pinned for run in runs} == {"r-1": True, "r-2": False}
        _, reason = await refused(stub.DeleteRun(pb.DeleteRunRequest(run_id="r-1")))
        assert reason == "run 'r-1' is pinned; unpin it first"
        await stub.PinRun(pb.PinRunRequest(run_id="r-1"))
        await stub.DeleteRun(pb.DeleteRunRequest(run_id="r-1"))


async def test_the_newest_verification_of_an_ended_run_is_shown_with_it(tmp_path: Path) -> None:
    result = pb.VerificationResult(
        conclusion="EQUAL", num_equal=7, num_unverified=1, workers=["w-1"], verified_by="me"
    )
    async with coordinator(tmp_path) as stub:
        await stub.SubmitRun(submit("r-1"))
        record = partial(pb.RecordVerificationRequest, run_id="r-1", result=result)
        code, reason = await refused(stub.RecordVerification(record()))
        assert (code, reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "run 'r-1' is active; it is verified at its end",
        )
        await stub.CancelRun(pb.CancelRunRequest(run_id="r-1"))
        for num_equal in (3, 7):
            result.num_equal = num_equal
            await stub.RecordVerification(record())
        shown = (await stub.GetRun(pb.GetRunRequest(run_id="r-1"))).run.last_verification
        assert (shown.conclusion, shown.num_equal, list(shown.workers)) == ("EQUAL", 7, ["w-1"])
        assert shown.verified_by == "", "the coordinator says who it was"
        assert shown.time_s > 0
        _, reason = await refused(stub.RecordVerification(record(run_id="r-2")))
        assert reason == "run 'r-2' is not known"
        result.conclusion = "FINE"
        _, reason = await refused(stub.RecordVerification(record()))
        assert reason.startswith("result.conclusion: 'FINE' is none of EQUAL, ")
    async with coordinator(tmp_path) as stub:
        shown = (await stub.GetRun(pb.GetRunRequest(run_id="r-1"))).run.last_verification
        assert shown.num_equal == 7
        await stub.DeleteRun(pb.DeleteRunRequest(run_id="r-1"))
        await stub.SubmitRun(submit("r-1"))
        assert not (await stub.GetRun(pb.GetRunRequest(run_id="r-1"))).run.HasField(
            "last_verification"
        )


async def test_one_subscription_follows_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "READ_AT_ONCE", 3)
    async with coordinator(tmp_path) as stub:
        for number in range(7):
            await stub.SubmitRun(submit(f"r-{number}"))
        for number in range(5):  # these are read from the journal
            await stub.CancelRun(pb.CancelRunRequest(run_id=f"r-{number}"))
        stream = stub.WatchRuns(pb.WatchRunsRequest())
        named: list[Any] = []
        while not (change := await stream.read()).is_complete:
            named += change.runs
        assert [run.run_id for run in named] == [f"r-{n}" for n in reversed(range(7))]
        assert (named[0].phase, named[2].phase) == (pb.RUN_PHASE_PLACING, pb.RUN_PHASE_CANCELLED)
        assert named[0].progress.reason == named[0].reason != ""
        await stub.CancelRun(pb.CancelRunRequest(run_id="r-6"))
        await stub.DeleteRun(pb.DeleteRunRequest(run_id="r-3"))
        await stub.SubmitRun(submit("new"))
        runs: dict[str, Any] = {}
        deleted: set[str] = set()
        while "new" not in runs or not deleted or runs["r-6"].ended_at_s == 0:
            change = await stream.read()
            runs.update({run.run_id: run for run in change.runs})
            deleted.update(change.deleted)
        assert deleted == {"r-3"}
        assert set(runs) == {"r-6", "new"}, "no other run has changed"
        assert runs["r-6"].phase == pb.RUN_PHASE_CANCELLED
        assert runs["new"].strategy == "Local"
        stream.cancel()


async def _kinds(stream: Any) -> list[str]:
    return [item.event.kind async for item in stream if item.HasField("event")]


async def test_worker_is_dialled_back_before_it_is_believed(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub, worker("one") as address, worker("two") as other:
        capability = types_pb2.Capability(device="cpu", num_threads=1, numerics_rules=CURRENT)

        def register(incarnation: str, address: str) -> Any:
            return stub.RegisterWorker(
                pb.RegisterWorkerRequest(
                    worker_id="w", incarnation=incarnation, address=address, capability=capability
                )
            )

        assert (await refused(register("three", address)))[0] is Code.UNAVAILABLE
        assert (await refused(register("one", "nowhere")))[0] is Code.INVALID_ARGUMENT
        answer = await register("one", address)
        assert answer.lease_ttl_s == PATIENCE_S
        code, reason = await refused(register("two", other))
        assert code is Code.ALREADY_EXISTS
        assert "choose another name" in reason
        await stub.Heartbeat(pb.HeartbeatRequest(worker_id="w", incarnation="one"))
        unknown = stub.Heartbeat(pb.HeartbeatRequest(worker_id="w", incarnation="zero"))
        assert (await refused(unknown))[0] is Code.NOT_FOUND
        (info,) = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
        assert (info.worker_id, info.is_alive, info.address) == ("w", True, address)


async def test_uploaded_data_can_be_named_and_missing_data_is_refused(tmp_path: Path) -> None:
    values = np.arange(7, dtype=np.float32)
    manifest = build_manifest([("train.x", "float32", (7,))], Purpose.DATA)
    content = [values.data.cast("B")]
    digest = blob_digest(manifest, content)
    async with coordinator(tmp_path) as stub:
        named = submit(data={"inline": digest})
        assert (await refused(stub.SubmitRun(named)))[0] is Code.NOT_FOUND
        header = pb.UploadDataRequest(
            header=pb.UploadDataHeader(digest=digest, manifest=to_proto(manifest))
        )
        for _ in range(2):
            await push(stub.UploadData, header, manifest, content)
        await stub.SubmitRun(named)


async def test_many_large_runs_are_listed_page_by_page(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub:
        model = {"entrypoint": "m:f", "kwargs": {"text": "x" * 900_000}}
        for number in range(6):
            await stub.SubmitRun(submit(f"r-{number}", model=model))
        found: list[str] = []
        request, num_pages = pb.ListRunsRequest(), 0
        while True:
            page = await stub.ListRuns(request)
            found += [run.run_id for run in page.runs]
            num_pages += 1
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
            await stub.CancelRun(pb.CancelRunRequest(run_id=page.runs[-1].run_id))
        assert found == [f"r-{number}" for number in reversed(range(6))]
        assert num_pages == 3
        for token in ("x", "nan", "1.0 Bad Id", "1.0"):
            code, reason = await refused(stub.ListRuns(pb.ListRunsRequest(page_token=token)))
            assert (code, reason.partition(":")[0]) == (Code.INVALID_ARGUMENT, "page_token")


async def test_leader_that_lives_is_not_replaced(tmp_path: Path) -> None:
    settings, gate = coordinator_settings(data_dir=tmp_path, lease_ttl_s=5.0), entrance()
    loop, has_looked = asyncio.get_running_loop(), asyncio.Event()
    gate.note_leader = lambda _: loop.call_soon_threadsafe(has_looked.set)  # type: ignore[method-assign,assignment]
    async with coordinator(tmp_path):
        second = asyncio.create_task(App.lead(settings, gate))
        async with asyncio.timeout(PATIENCE_S):
            await has_looked.wait()
        assert not second.done()
    app = await second
    assert app.loop.term == 2
    await app.loop.close()
