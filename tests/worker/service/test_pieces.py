"""The parts of the shell without processes."""

import asyncio
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    LimitError,
    StaleError,
    UnavailableError,
)
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.blobs import ReceivedBlobs
from stratagem.worker.host.clock import TorchThread
from stratagem.worker.process.settings import from_command_line
from stratagem.worker.service.sessions import FenceGuard
from stratagem.worker.session.control import (
    ABORTED,
    DRAINED,
    MAX_LOG_LINES,
    AwaitView,
    Control,
    MemberView,
    Outbox,
    PlanStopped,
    ViewChanged,
)
from stratagem.worker.session.states import StateStore, freeze
from tests.common.tensors.chunk_messages import iter_chunks

FENCES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")))


@given(FENCES)
@settings(max_examples=40)
async def test_a_fence_never_falls(calls: list[tuple[int, int, str]]) -> None:
    """`led_by` is what the coordinator says when it is asked."""
    guard, term, memberships, led_by = FenceGuard(), 0, {"a": 0, "b": 0}, 0

    def ask() -> None:
        asyncio.get_running_loop().call_soon(guard.see_term, led_by)

    guard.ask_with(ask)
    for given_term, membership, party in calls:
        fence = types_pb2.Fence(term=given_term, membership=membership)
        led_by = max(led_by, given_term)
        is_stale = given_term < term or membership < memberships[party]
        term = max(term, given_term)
        with pytest.raises(StaleError) if is_stale else nullcontext():
            await guard.check(fence, "run", party)
        memberships[party] = memberships[party] if is_stale else membership
    assert guard.term == term


async def test_a_term_counts_when_the_coordinator_has_said_it() -> None:
    """And what only asks does not move the fence."""
    guard, questions = FenceGuard(), []

    def ask() -> None:
        questions.append("?")
        asyncio.get_running_loop().call_soon(guard.see_term, 3)

    guard.ask_with(ask)
    with pytest.raises(UnavailableError, match=r"fence\.term: 9, but the coordinator's is 3"):
        await guard.check_term(9)
    await guard.check_term(3)
    assert (guard.term, len(questions)) == (3, 2)
    far = types_pb2.Fence(term=3, membership=2**64 - 1)
    await guard.check(far, "run", "", is_order=False)
    await guard.check(types_pb2.Fence(term=3, membership=1), "run", "")


def upload(
    cache: ReceivedBlobs, value: float, *, purpose: Purpose = Purpose.STATE, num: int = 600_000
) -> str:
    manifest, buffers = manifest_of({"x": torch.full((num,), value)}, purpose)
    digest = blob_digest(manifest, buffers)
    for part in (buffers[0][: num * 2], None):
        one = cache.open_upload("run", digest, manifest, 1)
        with pytest.raises(ConflictError):
            cache.open_upload("run", digest, manifest, 1)
        content = buffers if part is None else [part]
        for chunk in iter_chunks(content, one.writer.received):
            one.writer.write(chunk)
        one.is_open = False
    cache.commit("run", one)
    return digest


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_the_upload_of_a_frozen_coordinator_gives_way(tmp_path: Path, limit: int) -> None:
    cache = ReceivedBlobs(tmp_path, limit)
    manifest, buffers = manifest_of({"x": torch.ones(600_000)}, Purpose.STATE)
    digest = blob_digest(manifest, buffers)
    first, *rest = iter_chunks(buffers, 0)
    frozen = cache.open_upload("run", digest, manifest, 1)
    frozen.writer.write(first)
    successor = cache.open_upload("run", digest, manifest, 2)
    assert successor.writer.received == 0
    for chunk in (first, *rest):
        successor.writer.write(chunk)
    with suppress(StaleError):  # a file refuses it at once
        for chunk in rest:
            frozen.writer.write(chunk)
    with pytest.raises(StaleError):
        cache.commit("run", frozen)
    cache.commit("run", successor)
    assert cache.find("run", digest) is not None


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("limit", [0, 1 << 30])
async def test_blobs_in_memory_and_on_disk(tmp_path: Path, limit: int) -> None:
    cache = ReceivedBlobs(tmp_path, limit)
    waiting = asyncio.create_task(cache.get("run", upload(ReceivedBlobs(None, 1), 3.0)))
    data = upload(cache, 0.5, purpose=Purpose.DATA)
    digests = [upload(cache, value) for value in (1.0, 2.0, 3.0)]
    assert [cache.find("run", digest) is not None for digest in digests] == [False, True, True]
    assert cache.find("run", data) is not None
    tensors, _ = (await waiting).load()
    assert torch.equal(tensors["x"], torch.full((600_000,), 3.0))
    assert len(files_in(tmp_path)) == (3 if limit == 0 else 0)
    cache.clear()
    assert not files_in(tmp_path)
    assert cache.find("run", data) is None


@pytest.mark.parametrize("limit", [0, 1 << 30])
async def test_a_blob_that_a_plan_wants_outlives_newer_ones_until_it_is_read(
    tmp_path: Path, limit: int
) -> None:
    """All come before the waiting plan goes on, as they do where the event loop was held up. And a
    plan that outlives its run takes no state from the next run of that name."""
    cache = ReceivedBlobs(tmp_path, limit)
    digest = upload(ReceivedBlobs(None, 1), 1.0)
    for who in (1, 2):
        cache.want("run", digest, who)
    waiting = asyncio.create_task(cache.get("run", digest))
    await asyncio.sleep(0)
    for value in (1.0, 2.0, 3.0):
        upload(cache, value)
    tensors, _ = (await waiting).load()
    assert torch.equal(tensors["x"], torch.full((600_000,), 1.0))
    cache.release("run", 1)
    assert cache.find("run", digest) is not None
    assert not cache.was_dropped("run", digest)
    for value in (4.0, 5.0):
        upload(cache, value)
    cache.release("run", 2)
    assert (cache.find("run", digest), cache.was_dropped("run", digest)) == (None, True)
    upload(cache, 1.0)
    assert not cache.was_dropped("run", digest)
    assert len(files_in(tmp_path)) == (2 if limit == 0 else 0)
    cache.want("run", digest, "of the closed run")
    cache.drop_run("run")
    assert not files_in(tmp_path)
    assert not cache.was_dropped("run", digest)
    cache.want("run", digest, "of the resumed run")
    cache.release("run", "of the closed run")
    for value in (1.0, 2.0, 3.0):
        upload(cache, value)
    assert cache.find("run", digest) is not None
    cache.clear()


@pytest.mark.parametrize(
    ("federations", "limit", "has_folder", "num_kept"),
    [
        (0, 1 << 30, True, 2),
        (1, 1 << 30, True, 2),
        (3, 1 << 30, True, 6),
        (3, 0, True, 6),  # in files
        (3, 70_000, True, 6),  # the others in files
        (9, 1 << 30, True, 16),
        (8, 75_000, False, 3),  # without a folder as far as memory allows
        (8, 1, False, 2),
    ],
)
def test_two_states_are_kept_for_each_federation_whose_clients_train_here(
    tmp_path: Path, federations: int, limit: int, has_folder: bool, num_kept: int
) -> None:
    cache = ReceivedBlobs(tmp_path if has_folder else None, limit)
    for number in range(federations):
        cache.note_federation("run", f"member{number}")
    digests = [upload(cache, float(value), num=6_000) for value in range(20)]
    held = [cache.find("run", digest) is not None for digest in digests]
    assert held == [place >= 20 - num_kept for place in range(20)]
    assert cache.memory_bytes <= limit or not has_folder


@pytest.mark.parametrize("limit", [0, 1 << 30])
async def test_what_came_in_parts_must_have_the_digest(tmp_path: Path, limit: int) -> None:
    cache = ReceivedBlobs(tmp_path, limit, max_uploads=2)
    manifest, buffers = manifest_of({"x": torch.full((600_000,), 1.0)}, Purpose.STATE)
    _, others = manifest_of({"x": torch.full((600_000,), 2.0)}, Purpose.STATE)
    digest = blob_digest(manifest, buffers)
    for first, is_right in ((others, False), (buffers, True)):
        one = cache.open_upload("run", digest, manifest, 1)
        assert one.writer.received == 0
        one.writer.write(next(iter_chunks([first[0][:1000]])))
        one.is_open = False
        one = cache.open_upload("run", digest, manifest, 1)
        assert (one.writer.received, one.num_streams) == (1000, 2)
        for chunk in iter_chunks(buffers, 1000):
            one.writer.write(chunk)
        if is_right:
            one.check()
            break
        with pytest.raises(IntegrityError, match="several streams"):
            one.check()
        cache.forget("run", one)
    cache.commit("run", one)
    assert cache.find("run", digest) is not None
    cache.clear()
    assert not files_in(tmp_path)


async def test_uploads_that_nobody_goes_on_with_do_not_pile_up(tmp_path: Path) -> None:
    cache = ReceivedBlobs(tmp_path, 0, max_uploads=2)
    manifest, _ = manifest_of({"x": torch.ones(600)}, Purpose.STATE)
    for number in range(5):
        cache.open_upload("run", f"{number:064}", manifest, 1).is_open = False
    assert len(files_in(tmp_path)) == 2
    for number in range(2):
        cache.open_upload("run", f"{number:064}", manifest, 1)
    with pytest.raises(LimitError, match="max_uploads: 2 uploads are open, the limit is 2"):
        cache.open_upload("run", "9" * 64, manifest, 1)
    cache.clear()


class Cut:
    is_cut = False

    def cut(self) -> None:
        self.is_cut = True


def view(membership: int) -> MemberView:
    return MemberView(1, membership, 0, ())


async def test_control_cuts_what_is_held_under_an_older_view() -> None:
    control, exchange = Control(asyncio.get_running_loop(), view(1)), Cut()
    control.hold(exchange, 1)
    control.set_view(view(2))
    assert exchange.is_cut
    late, current = Cut(), Cut()
    control.hold(late, 1)
    assert late.is_cut
    control.hold(current, 2)
    assert not current.is_cut
    control.drain()
    assert not current.is_cut
    control.interrupt(ABORTED)
    assert current.is_cut


async def test_waits_end_when_the_ground_moves() -> None:
    loop = asyncio.get_running_loop()
    control = Control(loop, view(1))

    async def forever() -> None:
        await asyncio.Event().wait()

    async def soon() -> int:
        return 7

    assert await asyncio.to_thread(control.wait, soon(), 1) == 7
    moved = asyncio.create_task(asyncio.to_thread(control.wait, forever(), 1))
    with pytest.raises(AwaitView):
        control.view_after(1)
    control.set_view(view(2))
    with pytest.raises(ViewChanged):
        await moved
    assert control.view_after(1).membership == 2
    drained = asyncio.create_task(asyncio.to_thread(control.wait, forever()))
    control.drain()
    with pytest.raises(PlanStopped) as end:
        await drained
    assert end.value.reason == DRAINED
    control.interrupt(ABORTED)
    with pytest.raises(PlanStopped) as end:
        await asyncio.to_thread(control.wait, forever(), 2)
    assert end.value.reason == ABORTED


@pytest.mark.parametrize("must_cut", [True, False])
async def test_an_exchange_with_callers_that_is_made_without_them_is_cut(
    must_cut: bool,
) -> None:
    """It would wait for them in the torch thread, in which the plans that they attend wait."""
    control, exchange, after = Control(asyncio.get_running_loop(), view(1)), Cut(), Cut()
    control.set_deserted(True, must_cut=must_cut)
    control.hold(exchange, 1)
    assert exchange.is_cut == must_cut
    control.set_deserted(False)
    control.hold(after, 1)
    assert not after.is_cut
    control.set_deserted(True, must_cut=must_cut)
    assert after.is_cut == must_cut


async def test_an_outbox_tells_latecomers_what_counts() -> None:
    outbox = Outbox("w")
    for step in range(3):
        outbox.progress(pb.Progress(step=step))
    for number in range(MAX_LOG_LINES + 2):
        outbox.log(pb.LogLine(text=str(number)))
    outbox.need("a")
    outbox.need("b")
    outbox.has("a")
    outbox.finish(pb.ExecuteResult(build=pb.BuildResult()))
    said = [message async for message in outbox.follow()]
    kinds = [message.WhichOneof("message") for message in said]
    assert kinds[0] == "need_blob"
    assert said[1].log.text == "(2 lines were dropped here)"
    assert said[2].log.text == "2"
    assert said[-2].progress.step == 2
    assert kinds[-1] == "result"
    late = [message.WhichOneof("message") async for message in outbox.follow()]
    assert late == ["need_blob", "progress", "result"]
    await outbox.ended()
    outbox.close()
    with pytest.raises(ConflictError):
        [message async for message in outbox.follow()]


async def test_a_need_that_comes_while_another_is_sent_is_sent_too() -> None:
    outbox = Outbox("w")
    outbox.need("a")
    told: list[tuple[str, bool]] = []
    async for message in outbox.follow():
        if not message.HasField("need_blob"):
            break
        told.append((message.need_blob.digest, message.need_blob.was_here))
        match len(told):
            case 1:
                outbox.has("a")
                outbox.need("b", was_here=True)
            case 2:
                outbox.has("b")
                outbox.need("a")
            case 3:
                outbox.finish(pb.ExecuteResult(build=pb.BuildResult()))
    assert told == [("a", False), ("b", True), ("a", False)]


async def test_what_comes_with_the_outcome_while_progress_is_taken_goes_before_it() -> None:
    outbox = Outbox("w")
    outbox.progress(pb.Progress(step=1))
    kinds: list[str] = []
    async for message in outbox.follow():
        kinds.append(str(message.WhichOneof("message")))
        if kinds == ["progress"]:
            outbox.log(pb.LogLine(text="the last line of the user's code"))
            outbox.add_profile(pb.Profile())
            outbox.finish(pb.ExecuteResult(build=pb.BuildResult()))
    assert kinds == ["progress", "log", "profile", "result"]


async def test_each_call_gets_the_parts_of_a_history_in_order_from_its_first_on() -> None:
    outbox = Outbox("w")
    taken: list[tuple[int, int]] = []
    outbox.add_history(pb.HistoryPart(number=0, from_step=1))
    async for message in outbox.follow():
        taken.append((message.history.from_step, message.history.number))
        match len(taken):
            case 1:
                outbox.add_history(pb.HistoryPart(number=1, from_step=1))
            case 2:
                outbox.restart_history()
                outbox.add_history(pb.HistoryPart(number=0, from_step=2))
            case 3:
                outbox.progress(pb.Progress(step=5))
            case 4:  # while the progress is taken, the end comes
                outbox.add_history(pb.HistoryPart(number=1, from_step=2))
                outbox.finish(pb.ExecuteResult(train=pb.TrainResult(num_history_parts=2)))
    assert taken == [(1, 0), (1, 1), (2, 0), (0, 0), (2, 1), (0, 0)]
    late = [message async for message in outbox.follow()]
    parts = [(each.history.from_step, each.history.number) for each in late]
    assert parts == [(2, 0), (2, 1), (0, 0), (0, 0)]
    assert [each.WhichOneof("message") for each in late[2:]] == ["progress", "result"]


async def test_the_live_state_is_that_of_the_step_that_is_asked_for() -> None:
    store = StateStore()
    early, late = (freeze({"x": torch.ones(1)}, {"step": step}) for step in "67")
    waiting = asyncio.create_task(store.live(7, 60.0))
    await asyncio.sleep(0)
    store.set_live(6, early)
    await asyncio.sleep(0)
    assert not waiting.done()
    store.set_live(7, late)
    assert await waiting is late


def test_the_torch_thread_runs_jobs_in_order() -> None:
    thread, seen = TorchThread(1), list[tuple[int, str]]()
    thread.start()

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(3):
        thread.submit(partial(note, number))
    assert thread.stop(10.0)
    assert seen == [(0, "torch"), (1, "torch"), (2, "torch")]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_WORKER_TAGS", "x,y")
    monkeypatch.setenv("STRATAGEM_WORKER_THREADS", "3")
    needed = ["--coordinator", "h:1", "--name", "w"]
    settings = from_command_line(
        [*needed, "--threads", "2", "--allow", "a:*", "--allow", "b.*:*", "--local-data", "n=m:f"]
    )
    assert settings.tags == ["x", "y"]
    assert settings.threads == 2
    assert settings.allow == ["a:*", "b.*:*"]
    assert settings.local_data == {"n": "m:f"}
    for wrong in (
        ["--listen", "nowhere"],
        ["--local-data", "n"],
        ["--threads", "0"],
        ["--mesh", "nccl"],
        ["--mesh", "tcp"],
    ):
        with pytest.raises(ValueError, match=wrong[0].strip("-").replace("-", "_")):
            from_command_line([*needed, *wrong])
