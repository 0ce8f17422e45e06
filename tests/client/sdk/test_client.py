"""The client against a scripted coordinator: what calls mean, and what survives a cut."""

import json
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from stratagem.client import AsyncClient, Client, Event, Phase, Progress
from stratagem.client.sdk import connection
from stratagem.client.sdk import run as async_run
from stratagem.client.sdk.blocking import RunHandle
from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    RunFailedError,
    UnavailableError,
    UserCodeError,
)
from stratagem.common.identity.certificates import Authority, init
from stratagem.common.job import JobSpec
from stratagem.common.rpc.tensor_transfer import SMALL_CHUNK_BYTES
from stratagem.v1 import coordinator_pb2 as pb
from tests.client.fake_coordinator import JOB, FakeCoordinator, serve
from tests.free_ports import free_port
from tests.patience import PATIENCE_S


def events_of(items: list[Event | Progress]) -> list[int]:
    return [item.index for item in items if isinstance(item, Event)]


# ---- runs ----


def test_a_job_may_be_a_mapping_a_spec_or_a_file(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    spec = JobSpec.parse(JOB)
    path.write_text(spec.canonical_json())
    for job in (JOB, spec, path, str(path)):
        run = client.submit(job)
        assert run.run_id.startswith("digits-")
        assert run.status().job == {**run.status().job, "name": "digits", "epochs": 1}
    assert len({run.run_id for run in client.runs()}) == 4


def test_the_same_id_starts_one_run_and_wrong_jobs_are_refused(client: Client) -> None:
    first, second = client.submit(JOB, "mine"), client.submit(JOB, "mine")
    assert first.run_id == second.run_id == "mine"
    with pytest.raises(ConflictError, match="run mine has another job"):
        client.submit({**JOB, "seed": 1}, "mine")
    with pytest.raises(InvalidInputError) as caught:
        client.submit({**JOB, "batch_size": 0, "epoch": 3})
    assert {each.field for each in caught.value.violations} == {"batch_size", "epoch"}
    assert len(client.runs()) == 1, "nothing else was sent"


def test_status_tells_what_the_coordinator_knows(client: Client) -> None:
    status = client.submit(JOB, "mine").status()
    assert (status.phase, status.reason) == (Phase.COMPLETED, "1 epoch done")
    assert (status.strategy, status.seconds) == ("Local", 3.5)
    assert status.metrics == {"test.accuracy": 0.97, "train.loss": 0.1}
    final, best, first = (status.commit(which) for which in ("final", "best", "1"))
    assert final is not None
    assert final.path == "/f"
    assert best is not None
    assert best == first
    assert status.commit("9") is None


def test_result_gives_the_final_status_and_the_model(client: Client) -> None:
    result = client.submit(JOB).result()
    assert result.metrics["test.accuracy"] == 0.97
    state = result.state_dict()
    assert list(state) == ["weight", "bias"]
    assert state["bias"].tolist() == [1.5, -2.0]


def test_a_failed_run_raises_its_reason_or_the_exception_of_the_users_code(
    client: Client, fake: FakeCoordinator
) -> None:
    fake.ending = "failed"
    with pytest.raises(RunFailedError, match="run mine failed: worker-0 died three times"):
        client.submit(JOB, "mine").result()
    fake.ending = "user error"
    with pytest.raises(UserCodeError) as caught:
        client.submit(JOB).result()
    error = caught.value
    assert (error.type, error.message) == ("ValueError", "bad hidden")
    assert (error.worker_id, error.activity) == ("worker-1", "build model")
    assert 'File "m.py", line 3' in error.traceback


@pytest.mark.parametrize(
    "waiting",
    [
        lambda run: run.result(timeout_s=0.05),
        lambda run: run.wait(timeout_s=0.05),
        lambda run: list(run.watch(timeout_s=0.05)),
    ],
)
def test_a_wait_ends_at_its_time_and_the_run_goes_on(
    client: Client, fake: FakeCoordinator, waiting: Callable[[RunHandle], object]
) -> None:
    fake.ending = "never"
    run = client.submit(JOB, "mine")
    with pytest.raises(TimeoutError):
        waiting(run)
    assert fake.unwatched.wait(PATIENCE_S)  # no call is left behind
    assert run.status().phase is Phase.RUNNING
    run.cancel()
    assert run.wait(timeout_s=PATIENCE_S).phase is Phase.CANCELLED


def test_a_wait_of_no_time_asks_once(client: Client, fake: FakeCoordinator) -> None:
    assert client.submit(JOB, "over").result(timeout_s=0).status.phase is Phase.COMPLETED
    fake.ending = "never"
    run = client.submit(JOB, "mine")
    words = "run mine has not ended; running: segment 1 committed"
    with pytest.raises(TimeoutError, match=words):
        run.result(timeout_s=0)
    assert fake.watched_from == []
    for wrong in (-1, float("nan")):
        with pytest.raises(InvalidInputError, match=f"timeout_s: {wrong} is not 0 or more"):
            run.wait(timeout_s=wrong)


async def test_a_wait_of_no_time_ends_although_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_run, "ASKING_S", 0.05)
    server, address = await serve(FakeCoordinator(), free_port())
    async with AsyncClient(address) as client:
        run = await client.submit(JOB, "mine")
        await server.stop(None)
        for waiting in (run.wait, run.result):
            with pytest.raises(TimeoutError, match="run mine has not ended; nobody has answered"):
                await waiting(0)


def test_cancel_resume_delete(client: Client, fake: FakeCoordinator) -> None:
    fake.ending = "never"
    run = client.submit(JOB, "mine")
    run.cancel()
    run.cancel()
    with pytest.raises(RunFailedError, match="run mine cancelled: cancelled by a client"):
        run.result()
    run.resume()
    assert run.result().status.phase is Phase.COMPLETED
    run.delete()
    with pytest.raises(NotFoundError, match="no run 'mine'"):
        client.get("mine")


def test_workers_are_listed(client: Client) -> None:
    alive, lost = client.workers()
    assert (alive.worker_id, alive.device_name, alive.tags) == (
        "worker-0",
        "a processor",
        ("site-a",),
    )
    assert (lost.is_alive, lost.reason) == (False, "no heartbeat for 10 s")
    [refused] = client.refused_workers()
    assert (refused.worker_id, refused.address, refused.num_times) == ("worker-2", "[h]:1", 3)


# ---- watching ----


@pytest.mark.parametrize("says_why", [True, False])
def test_watch_gives_each_event_once_although_it_is_cut(
    client: Client, fake: FakeCoordinator, says_why: bool
) -> None:
    fake.cuts, fake.says_why = {0, 2}, says_why
    items = list(client.submit(JOB).watch())
    assert events_of(items) == [0, 1, 2, 3]
    progress = [item for item in items if isinstance(item, Progress)]
    assert progress[-1].metrics == {"train.neighbour_distance": 0.25}
    assert fake.watched_from == [0, 1, 3]


@pytest.mark.parametrize(("kinds", "expected"), [((), [0, 1, 2, 3]), (("RunCompleted",), [3])])
def test_watch_gives_what_happened_after_a_stream_that_ended_early(
    client: Client, fake: FakeCoordinator, kinds: tuple[str, ...], expected: list[int]
) -> None:
    """Although the run has ended by the time at which its status is asked for."""
    run = client.submit(JOB)
    fake.early_ends = {1, 3}
    assert events_of(list(run.watch(kinds=kinds))) == expected
    assert events_of(list(run.watch(kinds=("None",)))) == []


def test_watch_goes_on_where_the_caller_stopped(client: Client) -> None:
    run = client.submit(JOB)
    for item in run.watch():
        if isinstance(item, Event) and item.index == 1:
            break
    assert events_of(list(run.watch(from_index=2))) == [2, 3]
    assert events_of(list(run.watch(from_index=4))) == []


@pytest.mark.parametrize("says_begin", [True, False])
async def test_watch_waits_for_a_coordinator_that_restarts(says_begin: bool) -> None:
    fake = FakeCoordinator()
    fake.says_begin = says_begin
    fake.ending = "never"
    server, address = await serve(fake, free_port())
    seen: list[int] = []
    async with AsyncClient(address) as client:
        run = await client.submit(JOB, "mine")
        async for item in run.watch():
            if not isinstance(item, Event):
                continue
            seen.append(item.index)
            if item.index == 2:  # gone, and back at the same port with one event more
                await server.stop(None)
                port = int(address.rpartition(":")[2])
                server, _ = await serve(fake, port)
                fake.runs["mine"].say("RunCompleted", "done", pb.RUN_PHASE_COMPLETED)
        status = await run.status()
    await server.stop(None)
    assert seen == [0, 1, 2, 3]
    assert status.phase is Phase.COMPLETED
    assert fake.watched_from == [0, 3]


def test_calls_wait_for_a_coordinator_that_was_there(client: Client, fake: FakeCoordinator) -> None:
    run = client.submit(JOB)
    fake.refusals = 3
    assert run.status().phase is Phase.COMPLETED


def test_nobody_at_the_address_is_said_at_once() -> None:
    with (
        Client("127.0.0.1:9") as client,
        pytest.raises(UnavailableError) as caught,
    ):
        client.runs()
    assert str(caught.value) == "no coordinator answers at 127.0.0.1:9: connection refused"


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_container_that_does_not_listen_yet_is_waited_for(
    with_tls: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Docker takes connections to a published port at once, and closes them meanwhile."""
    if with_tls:
        init(tmp_path / "certs", workers=[], clients=["me"], hosts=[])
    tls = Authority(tmp_path / "certs").files("client-me") if with_tls else None
    monkeypatch.setattr(connection, "REPORTED_AFTER_S", 0.0)
    # The begin, the first failure, and its notice; late from then on.
    times_s = chain([0.0, 0.0, 0.0], repeat(connection.STARTING_S))
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(times_s)))

    def close_all() -> None:
        with suppress(OSError):
            while True:
                published.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as published:
        threading.Thread(target=close_all, daemon=True).start()
        address = f"127.0.0.1:{published.getsockname()[1]}"
        said = f"no coordinator answers at {address}"
        with Client(address, tls=tls) as client, pytest.raises(UnavailableError, match=said):
            client.runs()
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told.startswith(said)
    assert told.endswith("; trying again for up to 15 s")


async def test_the_environment_names_the_coordinator_of_who_names_none(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_COORDINATOR", address)
    async with AsyncClient() as client:
        assert await client.runs() == ()
    with Client() as blocking:
        assert blocking.address == address
    assert AsyncClient("another:7070").address == "another:7070"
    monkeypatch.setenv("STRATAGEM_COORDINATOR", "")
    assert AsyncClient().address == "127.0.0.1:7070"


def test_logs_are_not_repeated_after_a_cut(client: Client, fake: FakeCoordinator) -> None:
    run = client.submit(JOB)
    texts = ["submitted", "hello", "hello", "late"]
    assert [line.text for line in run.logs(follow=True)] == texts
    fake.log_cuts = [2]
    assert [line.text for line in run.logs(follow=True)] == texts
    assert [line.text for line in run.logs(worker="worker-1")] == ["late"]


# ---- states and data ----


def test_a_download_resumes_where_it_was_cut(
    client: Client, fake: FakeCoordinator, tmp_path: Path
) -> None:
    fake.download_cuts = [0, 2 * SMALL_CHUNK_BYTES]
    path = client.submit(JOB).download(tmp_path / "model.safetensors")
    assert fake.downloaded_from == [0, SMALL_CHUNK_BYTES, 5 * SMALL_CHUNK_BYTES]
    tensors = load_file(path)
    assert np.array_equal(tensors["model/weight"], np.arange(1_000_000, dtype=np.float32))
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_that_does_not_match_its_digest_leaves_no_file(
    client: Client, fake: FakeCoordinator, tmp_path: Path
) -> None:
    manifest, buffers = fake.state
    fake.state = manifest, [memoryview(bytes(len(buffers[0]))), *buffers[1:]]
    (tmp_path / "old.safetensors").write_text("old")
    with pytest.raises(IntegrityError, match="does not match its digest"):
        client.submit(JOB).download(tmp_path / "old.safetensors")
    assert (tmp_path / "old.safetensors").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(NotFoundError, match="no state '7'"):
        client.submit(JOB).download(tmp_path / "x", which="7")


def test_a_model_is_downloaded_as_a_folder_of_files(
    client: Client, fake: FakeCoordinator, tmp_path: Path
) -> None:
    fake.download_cuts = [0]
    run = client.submit(JOB)
    folder = run.download(tmp_path / "model", shard_size="1MB")
    assert fake.downloaded_from == [0, SMALL_CHUNK_BYTES]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert index["weight_map"] == {"weight": first, "bias": second}
    tensors = load_file(folder / first)
    assert np.array_equal(tensors["weight"], np.arange(1_000_000, dtype=np.float32))
    with pytest.raises(InvalidInputError, match="model exists already; nothing was written"):
        run.download(folder, shard_size="5GB")
    with pytest.raises(InvalidInputError, match="shard_size: 'five' is no size such as 8GB"):
        run.download(tmp_path / "x", shard_size="five")
    manifest, buffers = fake.state
    fake.state = manifest, [memoryview(bytes(len(buffers[0]))), *buffers[1:]]
    with pytest.raises(IntegrityError, match="does not match its digest"):
        run.download(tmp_path / "x", shard_size="1MB")
    assert list(tmp_path.iterdir()) == [folder]


def test_inline_data_are_uploaded_and_named_by_digest(
    client: Client, fake: FakeCoordinator
) -> None:
    x, y = np.ones((500_000, 2), dtype=np.float32), np.arange(500_000)
    fake.upload_cut = True
    run = client.submit(JOB, data={"train": (x, y), "test": ({"a": x[:1], "b": x[:1]}, None)})
    digest = run.status().job["data"]["inline"]
    assert fake.uploads[digest] == y.tobytes() + x.tobytes() + x[:1].tobytes() * 2


def test_tensors_and_arrays_have_the_same_digest(client: Client) -> None:
    x, y = np.random.default_rng(0).random((7, 3)), np.arange(7)
    digests = {
        client.submit(JOB, data=data).status().job["data"]["inline"]
        for data in (
            {"train": (x, y)},
            {"train": (torch.from_numpy(x), torch.from_numpy(y))},
            {"train": (np.asfortranarray(x), y.astype(">i8"))},
        )
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data: has no split"),
        ({"train": 3}, "data.train: is not a pair (x, y)"),
        ({"train": (np.ones(3), [1, 2, 3])}, "data.train.y: a list is not an array or tensor"),
        (
            {"train": (np.float32(1), np.ones(1))},
            "data.train.x: a float32 is not an array or tensor",
        ),
        ({"train": (np.array(1), None)}, "data.train.x: is a scalar"),
        (
            {"train": (np.ones(3), np.ones(2))},
            "data.train: numbers of rows differ: train.x has 3, train.y has 2",
        ),
        ({"train": (np.array(["a"]), None)}, "data.train.x: 'str32' is not one of float64"),
        (
            {"train": (np.ones(3, np.complex64), None)},
            "data.train.x: 'complex64' is not one of float64, float32, ",
        ),
        (
            {"train": ({"a": torch.ones(3, dtype=torch.complex64)}, np.ones(3))},
            "data.train.x.a: 'complex64' is not one of float64, float32, ",
        ),
        (
            {"train": (torch.ones(3), np.ones(3, np.complex64))},
            "data.train.y: 'complex64' is not one of float64, float32, ",
        ),
        (
            {"train": (torch.eye(3).to_sparse(), None)},
            "data.train.x: is a tensor of layout sparse_coo; allowed is strided",
        ),
    ],
)
def test_data_that_cannot_be_sent_are_named(client: Client, data: object, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        client.submit(JOB, data=data)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


# ---- notebooks ----


async def test_the_blocking_client_works_where_a_loop_runs_already(address: str) -> None:
    with Client(address) as client:
        run = client.submit(JOB, "mine")
        shown = run._repr_html_()
    assert shown.startswith(
        "<div><b>mine</b> Local · COMPLETED · 20 of 20 steps · test.accuracy 0.97"
    )
    with pytest.raises(RuntimeError, match="closed"):
        client.runs()
