"""Every call is told what no honest caller says; it answers in time, with a code that its proto
promises and a reason. The runs beside it, the journal and the data folders notice nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.v1 import coordinator_pb2 as cpb
from tests.hostile.attack import LIMIT_S, PROTOCOL, SLACK_S, Answer, lawless_channel
from tests.hostile.by_hand import Attack, attacks
from tests.hostile.generate import MANY, conversations, damaged, noise
from tests.hostile.promises import Method, method, methods
from tests.hostile.rig import Rig
from tests.hostile.samples import samples, upload_of
from tests.hostile.slow import ENDS, LYING, SILENT, Act, end_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.promise("Whatever a caller says, runs, journal and folders notice nothing."),
    # of hypothesis, about the texts that it draws from
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

Code = grpc.StatusCode
NUM_SWEEP, NUM_SOAK = 8, 200
VERSIONS: Sequence[Sequence[str]] = ([], ["2"], ["1", "1"], ["x" * 5000], [*map(str, range(300))])


def hammer(rig: Rig, each: Method, num_examples: int) -> None:
    """Noise, damaged messages and messages of the right type."""
    valid = [message.SerializeToString() for message in samples(rig.target)[each.name]]
    wrong: list[str] = []

    @settings(MANY, max_examples=3 * num_examples)
    @given(st.one_of(noise(), damaged(valid), conversations(each.request)))
    def say(frames: list[bytes]) -> None:
        answer = rig.say(each, frames)
        if found := answer.wrong(each):
            wrong.append(f"{found} to {[frame[:100] for frame in frames[:3]]}")

    say()
    assert not wrong, wrong


@pytest.mark.parametrize(
    "num_examples",
    [
        pytest.param(NUM_SWEEP, marks=pytest.mark.sweep),
        pytest.param(NUM_SOAK, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("each", methods(), ids=str)
def test_generated_conversations(rig: Rig, each: Method, num_examples: int) -> None:
    hammer(rig, each, num_examples)


@pytest.mark.cluster
def test_attacks_by_hand(rig: Rig) -> None:
    wrong = [found for attack in attacks(rig.target) if (found := fails(rig, attack))]
    assert not wrong, "\n".join(wrong)


def fails(rig: Rig, attack: Attack) -> str:
    each = method(attack.method)
    answer = rig.say(each, attack.frames, patience_s=PATIENCE_S)
    if answer.code not in attack.codes or attack.reason not in answer.reason:
        return f"{attack.name}: {each} answers {answer}"
    return answer.wrong(each)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.cluster if name == "says half" else pytest.mark.sweep)
        for name in (*SILENT, *LYING)
    ],
)
def test_callers_that_no_library_makes(rig: Rig, name: str) -> None:
    act, valid = {**SILENT, **LYING}[name], samples(rig.target)
    ends = rig.loop.call(all_at_once(rig, act, valid))
    for each, (end, seconds) in zip(methods(), ends, strict=True):
        assert end.code in ENDS[name], f"{each}: {end}"
        assert seconds < LIMIT_S + SLACK_S, f"{each}: {seconds:.1f} s"


async def all_at_once(rig: Rig, act: Act, valid: Any) -> Sequence[Any]:
    def ending(each: Method) -> Any:
        frames = [message.SerializeToString() for message in valid[each.name]]
        return end_of(rig.address_of(each), act, each.path, frames)

    return await asyncio.gather(*map(ending, methods()))


@pytest.mark.sweep
def test_a_stream_that_falls_silent_is_given_up_and_leaves_room_for_another(rig: Rig) -> None:
    digest, manifest, _ = upload_of(9000, seed=1)
    header = cpb.UploadDataRequest(
        header=cpb.UploadDataHeader(digest=digest, manifest=manifest)
    ).SerializeToString()
    each = method("UploadData")

    async def silent_and_busy() -> tuple[Answer, Code, str]:
        async with lawless_channel(rig.address_of(each)) as channel, asyncio.timeout(PATIENCE_S):
            while True:
                silent: Any = channel.stream_stream(each.path)(metadata=PROTOCOL)
                try:
                    await silent.write(header)
                    assert await silent.read() is not grpc.aio.EOF  # where to go on: it is received
                except grpc.aio.AioRpcError as refusal:
                    if refusal.code() not in (Code.ABORTED, Code.DEADLINE_EXCEEDED):
                        raise
                    continue  # the upload let go below may still be open there
                busy = await rig.saying(each, [header], is_last=False)
                if busy.code is None and silent.done():
                    continue  # the machine stood still for so long that it was given up before
                return busy, await silent.code(), await silent.details()

    busy, code, reason = rig.loop.call(silent_and_busy())
    assert (busy.code, code) == (Code.ABORTED, Code.DEADLINE_EXCEEDED)
    assert digest in busy.reason
    assert "silent for 1 s" in reason
    false = cpb.UploadDataRequest(chunk=upload_of(9000, seed=2)[2][0]).SerializeToString()
    assert rig.say(each, [header, false], patience_s=PATIENCE_S).code is Code.DATA_LOSS


@pytest.mark.cluster
def test_strange_metadata(rig: Rig) -> None:
    """Ten thousand entries, and wrong versions of the protocol."""
    many = (*PROTOCOL, *((f"key-{number}", "x") for number in range(10_000)))
    for name in ("SubmitRun", "WatchRun", "UploadData", "Execute", "Send"):
        answer = rig.say(method(name), [b""], metadata=many)
        assert answer.code is Code.RESOURCE_EXHAUSTED  # by gRPC itself, which need not say why
    for number, each in enumerate(methods()):
        versions = VERSIONS[number % len(VERSIONS)]
        metadata = [("stratagem-protocol", version) for version in versions]
        answer = rig.say(each, [b""], metadata=metadata)
        assert answer.code is Code.FAILED_PRECONDITION, (each, answer)
        assert not answer.wrong(each), answer
