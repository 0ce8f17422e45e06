"""The port at which workers talk to each other is attacked while they do: parties that exchange
gradients over it, and pipelines that send activations, end with the bits of an undisturbed run."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.v1 import peer_pb2 as ppb
from stratagem.v1 import types_pb2
from tests.cluster.jobs import data_parallel, model_parallel, outcome_of
from tests.common.tensors.chunk_messages import iter_chunks
from tests.hostile.generate import MANY, conversations, damaged, noise
from tests.hostile.promises import method
from tests.hostile.rig import Rig, calm_runs, nothing_left_behind, under_attack
from tests.hostile.samples import samples
from tests.jobs import job

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("What is said at the port of members changes no bits of their runs."),
]

SEND = method("Send")
NUM_EXAMPLES = 20
MAX_ROUNDS = 40
STRATEGIES: dict[str, dict[str, Any]] = {
    "gradients": data_parallel(2),
    "activations": model_parallel({"0 1": "worker-0", "2": "worker-1"}),
}
GROUPS = {"DataParallel": "", "ModelParallel": "replica0"}
"""How the members call the party inside which they talk."""
FAR = 10**9
"""A step that no run comes to: an attack on the very messages of a run needs no defect of ours."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    limits: dict[str, Any] = {
        "STRATAGEM_WORKER_MESH": "grpc",
        "STRATAGEM_WORKER_EXCHANGE_TIMEOUT_S": "30",
    }
    with under_attack(tmp_path_factory.mktemp("peers"), workers=2, **limits) as attacked:
        yield attacked


@pytest.fixture
def rig(cluster: Rig, request: pytest.FixtureRequest) -> Rig:
    """Its calm runs have the strategy that the test names."""
    cluster.calm = job(steps=6, strategy=STRATEGIES[request.param])
    with cluster.cluster.client() as client:
        run = client.submit(cluster.calm, "calm-reference")
        cluster.digests = outcome_of(run).digests
        run.delete()
    return cluster


def header(rig: Rig, size: int | None = None, **changes: Any) -> ppb.SendRequest:
    """Of the run that goes on, from its member 1 to its member 0; size: of a float32 tensor."""
    tensors = [] if size is None else [("x", "float32", (size,))]
    fields: dict[str, Any] = {
        "fence": types_pb2.Fence(term=1, membership=changes.pop("membership", 1)),
        "run_id": rig.calm_run,
        "party": GROUPS[type(rig.calm.strategy).__name__],
        "source": 1,
        "manifest": to_proto(build_manifest(tensors, Purpose.MESH)),
    }
    return ppb.SendRequest(header=ppb.PeerHeader(**{**fields, **changes}))


def chunks(size: int) -> list[ppb.SendRequest]:
    return [ppb.SendRequest(chunk=each) for each in iter_chunks([memoryview(bytes(4 * size))])]


def attacks_on_the_run(rig: Rig) -> dict[str, list[ppb.SendRequest]]:
    """What somebody can say who knows the run, its party and its membership."""
    hello, (chunk,) = header(rig), chunks(7)
    wrong = ppb.SendRequest(chunk=chunk.chunk)
    wrong.chunk.crc32c ^= 1
    far = {"step": FAR, "tag": 2**32 - 1}
    return {
        "says who it is and leaves": [hello],
        "comes early": [hello, header(rig, 7, **far), chunk],
        "comes twice": [hello, *([header(rig, 7, **far), chunk] * 2)],
        "leaves in the middle": [hello, header(rig, 7, step=FAR + 1)],
        "has a wrong checksum": [hello, header(rig, 7, step=FAR + 2), wrong],
        "is a header where a chunk is due": [hello, header(rig, 7, step=FAR + 3), hello],
        "is larger than any": [hello, header(rig, 2**30, **far)],
        "is larger than all early ones may be": [hello, header(rig, 2**28, step=FAR + 4)],
        "begins with a chunk": [chunk],
        "goes on with a chunk": [hello, chunk],
        "comes from the member itself": [header(rig, source=0)],
        "comes from no member": [header(rig, source=9)],
        "goes to no member": [header(rig, destination=9)],
        "is of an older membership": [header(rig, membership=0)],
        "is of a later membership": [header(rig, membership=99)],
        "is of another party": [header(rig, party="a/b")],
        "changes its sender": [hello, header(rig, 7, source=0)],
        "changes its membership": [hello, header(rig, 7, membership=2)],
    }


@pytest.mark.parametrize("rig", ["gradients"], indirect=True)
def test_noise_and_messages_of_the_right_type(rig: Rig) -> None:
    valid = [message.SerializeToString() for message in samples(rig.target)["Send"]]
    wrong: list[str] = []

    @settings(MANY, max_examples=NUM_EXAMPLES)
    @given(st.one_of(noise(), damaged(valid), conversations(SEND.request)))
    def say(frames: list[bytes]) -> None:
        if found := rig.say(SEND, frames).wrong(SEND):
            wrong.append(f"{found} to {[frame[:100] for frame in frames[:3]]}")

    with nothing_left_behind(rig), calm_runs(rig):
        say()
    assert not wrong, wrong


@pytest.mark.parametrize("rig", STRATEGIES, indirect=True)
def test_messages_for_the_very_run(rig: Rig) -> None:
    wrong: list[str] = []
    num_met = 0
    with nothing_left_behind(rig), calm_runs(rig, may_form_anew=True):
        for _ in range(MAX_ROUNDS):
            for name, said in attacks_on_the_run(rig).items():
                answer = rig.say(SEND, [each.SerializeToString() for each in said])
                num_met += answer.num_responses > 0  # the member was there
                if found := answer.wrong(SEND):
                    wrong.append(f"{name}: {found}")
            if num_met > len(attacks_on_the_run(rig)):
                break
    assert not wrong, wrong
    assert num_met > 0, "no attack has met a run"
