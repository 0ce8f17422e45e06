"""What a worker under somebody else's control gets from its coordinator, and can do to it."""

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.text import is_printable
from stratagem.coordinator.effects.execute import MAX_NAMES, MAX_PROFILES, blobs_named, let_in
from stratagem.coordinator.observe.profiles import Profiles
from stratagem.v1 import coordinator_pb2 as cpb
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as wpb
from tests.hostile.liar import lied_to, raises, run_to_its_end, says
from tests.jobs import job

BASE, INLINE, GIVEN = "1" * 64, "2" * 64, "3" * 64


def test_a_plan_names_its_base_what_its_job_names_and_what_a_client_has_kept() -> None:
    plain = json.loads(job().canonical_json())
    assert blobs_named(wpb.ExecuteRequest(build=wpb.BuildPlan()), plain) == frozenset()
    both = json.loads(job(data={"inline": INLINE}, initial={"digest": GIVEN}).canonical_json())
    for name in ("train", "client_round", "evaluate"):
        request = wpb.ExecuteRequest()
        getattr(request, name).base.digest = BASE
        assert blobs_named(request, plain) == {BASE}
        assert blobs_named(request, both) == {BASE, INLINE, GIVEN}
    kept = wpb.ClientStateRef(round=2, digest=GIVEN)
    plan = wpb.ClientRoundPlan(base=wpb.StateRef(digest=BASE), state=kept)
    assert blobs_named(wpb.ExecuteRequest(client_round=plan), {}) == {BASE, GIVEN}


async def test_a_worker_is_brought_no_blob_that_its_plan_does_not_name(tmp_path: Path) -> None:
    foreign = "f" * 64

    def asks(request: wpb.ExecuteRequest) -> list[wpb.ExecuteResponse]:
        return [says(need_blob=wpb.NeedBlob(digest=foreign)), raises("was told nothing")]

    async with lied_to(tmp_path, asks) as (stub, liar):
        events = await run_to_its_end(stub)
    assert events[-1].kind == "RunFailed"
    assert f"worker liar asks for blob {foreign}, which its plan does not name" in (
        events[-1].sentence
    )
    assert liar.brought == []


async def test_what_a_worker_says_is_short_and_moves_no_cursor_and_is_its_own(
    tmp_path: Path,
) -> None:
    """In the log, in the events, in the status: the coordinator's own lines have no worker."""

    def shouts(request: wpb.ExecuteRequest) -> list[wpb.ExecuteResponse]:
        forged = wpb.LogLine(worker_id="", level="IN\x1b[2JFO", text="all is well\x1b]0;owned\x07")
        endless = wpb.LogLine(worker_id="other", level="PRINT", text="x" * 100_000)
        error = types_pb2.UserError(
            type="E" * 1000,
            message="\x1b[31mred\x1b[0m\x1b[1A" + "m" * 100_000,
            traceback="t" * 200_000 + "\x9b2J the end",
            worker_id="other",
            activity="lying\nagain",
        )
        return [says(log=forged), says(log=endless), says(result=wpb.ExecuteResult(error=error))]

    async with lied_to(tmp_path, shouts) as (stub, _):
        events = await run_to_its_end(stub)
        lines = [line async for line in stub.TailLogs(cpb.TailLogsRequest(run_id="r"))]
        run = (await stub.GetRun(cpb.GetRunRequest(run_id="r"))).run
    first, second = [line for line in lines if line.level != "INFO"]
    assert (first.worker_id, first.level) == ("liar", "IN\\x1b[2JFO")
    assert first.text == "all is well\\x1b]0;owned\\x07"
    assert (second.worker_id, len(second.text)) == ("liar", 8192)
    error = run.error
    assert (len(error.type), error.worker_id, error.activity) == (256, "liar", "lying\\x0aagain")
    assert error.message.startswith("red\\x1b[1Ammm")
    assert error.traceback.endswith("\\x9b2J the end")
    assert len(error.traceback) < 100_100
    shown = [*(event.sentence for event in events), *(line.text for line in lines), run.reason]
    assert all(is_printable(text.replace("\n", "")) for text in shown)


async def test_recordings_are_taken_when_asked_for_and_not_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, str, bool]] = []
    bomb = gzip.compress(b'{"base_ns": 1, "events": [' + b"[" * 2**24)

    def add(_self: Profiles, run_id: str, profile: wpb.Profile) -> None:
        on_loop = threading.current_thread() is threading.main_thread()
        taken.append((run_id, profile.worker_id, on_loop))

    def records(request: wpb.ExecuteRequest) -> list[wpb.ExecuteResponse]:
        profile = wpb.Profile(worker_id="other", party="../..", events_gzip=bomb)
        return [*([says(profile=profile)] * 50), raises()]

    monkeypatch.setattr(Profiles, "add", add)
    async with lied_to(tmp_path, records) as (stub, _):
        await run_to_its_end(stub, "unasked")
        assert taken == []
        await run_to_its_end(stub, "asked", execution={"profiling": True})
    assert set(taken) == {("asked", "liar", False)}
    assert len(taken) <= MAX_PROFILES


def test_names_are_bounded_in_number_length_and_characters() -> None:
    train = wpb.TrainResult(metrics={f"m{number}": 1.0 for number in range(5000)})
    train.metrics["\x1b[2J"] = train.metrics["x" * 300] = 1.0
    train.parts.add(split="te\x00st", sums={"accuracy": 1.0, "a\nb": 1.0})
    message = says(result=wpb.ExecuteResult(train=train))
    let_in(message, "w0")
    kept = message.result.train
    assert len(kept.metrics) <= MAX_NAMES
    assert all(is_printable(name) and len(name) <= 256 for name in kept.metrics)
    assert kept.parts[0].split == "te\\x00st"
    few = wpb.TrainResult(metrics={"grad_norm": 1.0}, engine="gloo ring", traffic={"sent": 3})
    few.parts.add(split="test", sums={"loss": 1.0, "accuracy": 2.0})
    said = says(result=wpb.ExecuteResult(train=few))
    same = wpb.ExecuteResponse.FromString(said.SerializeToString())
    let_in(same, "w0")
    assert same == said


def test_every_text_of_every_answer_is_bounded() -> None:
    """Whatever field a message gets: its text does not pass as it is."""
    wild, answers = "\x1b" * 1_000_000, (wpb.ExecuteResponse, wpb.DescribeResponse)

    def fill(message: Any, depth: int = 0) -> Any:
        for each in message.DESCRIPTOR.fields:
            is_text = each.type == each.TYPE_STRING
            if each.message_type is not None and each.message_type.GetOptions().map_entry:
                value = each.message_type.fields_by_name["value"]
                if value.type == value.TYPE_STRING:
                    getattr(message, each.name)["name"] = wild
            elif is_text and each.is_repeated:
                getattr(message, each.name).append(wild)
            elif is_text:
                setattr(message, each.name, wild)
            elif each.message_type is not None and each.is_repeated:
                fill(getattr(message, each.name).add(), depth + 1)
            elif each.message_type is not None and each.containing_oneof is None:
                fill(getattr(message, each.name), depth + 1)
        return message

    for kind in answers:
        oneof = kind.DESCRIPTOR.oneofs
        for field in oneof[0].fields if oneof else [None]:
            message = kind()
            fill(getattr(message, field.name) if field else message)
            let_in(message, "w0")
            assert message.ByteSize() < 10 * 110_000
            assert b"\x1b" not in message.SerializeToString()
