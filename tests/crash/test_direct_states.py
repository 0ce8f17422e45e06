"""States that workers write by themselves: one digest for any number of them, no byte twice, the
same bits whatever dies, and no leaf left that nothing needs.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.state_leaves import LeafList, list_bytes
from stratagem.coordinator.app.storage import Storage
from stratagem.coordinator.process.restore import RestoreSettings, restore
from tests.cluster.jobs import Gates, assert_same_bits, gates_in, park
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.coordinator.store.places import BUCKET
from tests.coordinator.store.troubled import FORBIDDEN, HALF, UNAVAILABLE
from tests.crash.failure_logs import LOGS
from tests.crash.jobs import ALL_REDUCE, GOSSIP, LOCAL, PIPELINE, crash_job, slices
from tests.crash.leaf_stores import InBucket, InFolder, LeafPlaceOutside, in_bucket
from tests.crash.rig import NUM_WORKERS, WORKER_TTL_S, Outcome, Rig, until
from tests.crash.whole_runs import assert_nothing_was_trained_twice, outcome_of_held
from tests.jobs import NOT_TRAINED, user_data
from tests.patience import PATIENCE_S
from tests.repository import ROOT
from tests.settings import coordinator_settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2 * PATIENCE_S)]

PARKABLE_WORKER = ROOT / "tests" / "cluster" / "parkable_worker.py"
JOB = crash_job(ALL_REDUCE, model="wide_middle", every=4)
"""Its state has three leaves: of the large layer, of its momentum, and of all else."""
SLICES = slices(mirror=0)
FULL = slices(partition_state="full")
SLICED = {**JOB, "strategy": SLICES}
STAGES = {
    **PIPELINE,
    "partitions": [
        {"node_ids": ["0", "1", "2"], "target": {"WorkerId": "worker-0"}},
        {"node_ids": ["3", "4"], "target": {"WorkerId": "worker-2"}},
    ],
}


@pytest.fixture(scope="module")
def lot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    with gates_in(tmp_path_factory.mktemp("parking")) as gates:
        yield gates


@pytest.fixture(scope="module", params=["folder", "bucket"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LeafPlaceOutside]:
    if request.param == "folder":
        yield InFolder(tmp_path_factory.mktemp("direct") / "coordinator" / "states")
    else:
        with in_bucket("direct") as bucket:
            yield bucket


@pytest.fixture(scope="module")
def direct_rig(
    tmp_path_factory: pytest.TempPathFactory, store: LeafPlaceOutside, lot: Gates
) -> Iterator[Rig]:
    data_dir = tmp_path_factory.mktemp("data")
    if isinstance(store, InFolder):
        data_dir = store.root.parent.parent
    cluster = LocalCluster(
        workers=NUM_WORKERS,
        threads=1,
        failpoints=True,
        data_dir=data_dir,
        import_path=(ROOT,),
        programs={
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, str(PARKABLE_WORKER)],
        },
        environment={
            "TEST_PARKING": str(lot.folder),
            "STRATAGEM_COORDINATOR_WORKER_TTL_S": str(WORKER_TTL_S),
            "STRATAGEM_COORDINATOR_HEARTBEAT_INTERVAL_S": "1",
            "STRATAGEM_COORDINATOR_METRICS_PORT": "0",
            **store.environment,
        },
    )
    with cluster, cluster.client() as client:
        yield Rig(cluster, client)


@pytest.fixture
def rig(direct_rig: Rig, request: pytest.FixtureRequest) -> Rig:
    request.node.stash[LOGS] = direct_rig.logs
    direct_rig.settle()
    return direct_rig


@pytest.fixture(scope="module")
def undisturbed(direct_rig: Rig) -> Outcome:
    direct_rig.settle()
    return direct_rig.outcome(JOB)


def has_no_garbage(store: LeafPlaceOutside) -> bool:
    """Whether each leaf that is there is once there, and named by the list of a state."""
    named = sorted({leaf for each in store.lists() for leaf in each.digests})
    return sorted(leaf for leaf, _ in store.uploads()) == named and not store.has_parts()


def states(rig: Rig, direction: str) -> float:
    """Bytes of states that have passed the coordinator."""
    flows = scraped(rig.cluster, "coordinator")["stratagem_stream_bytes_total"]
    return flows.get(labelled(direction=direction, kind="state"), 0.0)


# Which way bytes take changes nothing in who has them: the long tests try both.
BOTH_STORES = pytest.mark.parametrize(
    "store",
    ["folder", pytest.param("bucket", marks=pytest.mark.sweep)],
    indirect=True,
    scope="module",
)


@contextmanager
def nobody_can_write(store: LeafPlaceOutside) -> Iterator[None]:
    """The folder has another name, or no signed request is carried out."""
    if isinstance(store, InBucket):
        store.server.always_of_signed = FORBIDDEN
        try:
            yield
        finally:
            store.server.always_of_signed = None
        return
    assert isinstance(store, InFolder)
    name = store.root / "store-id"
    ours = name.read_text()
    name.write_text("of another coordinator")
    try:
        yield
    finally:
        name.write_text(ours)


def members(run: RunHandle) -> int:
    return max(len(e.payload["members"]) for e in run.events() if e.kind == "MembersFormed")


def committed(run: RunHandle) -> list[str]:
    return [each.digest for each in run.status().commits]


def test_any_number_of_workers_writes_the_same_state(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome, lot: Gates, tmp_path: Path
) -> None:
    before = states(rig, "received"), states(rig, "sent")
    runs = []
    for num_members in (3, 2, 1):
        run = rig.client.submit(JOB)
        run.result()
        assert members(run) == num_members
        runs.append(run)
        if num_members > 1:
            park(rig.cluster, lot, f"worker-{num_members - 1}")
            until(lambda n=num_members: len(rig.registered()) < n, "it has left")  # type: ignore[misc]
    lot.open()
    assert [committed(run) for run in runs] == 3 * [[*undisturbed.digests.values()]]
    assert (states(rig, "received"), states(rig, "sent")) == before, "nothing was relayed"
    runs[0].download(tmp_path / "direct.safetensors")
    content = (tmp_path / "direct.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() not in committed(runs[0])
    assert len({upload for _, upload in store.uploads()}) > 1


def test_the_file_is_the_one_that_is_relayed(
    rig: Rig, undisturbed: Outcome, tmp_path: Path
) -> None:
    run = rig.client.submit(JOB)
    run.result()
    run.download(tmp_path / "direct.safetensors")
    cluster = LocalCluster(workers=1, threads=1, import_path=(ROOT,))
    with cluster, cluster.client() as client:
        relayed = client.submit(JOB)
        relayed.result().download(tmp_path / "relayed.safetensors")
        (digest,) = {each.digest for each in relayed.status().commits if each.is_final}
    content = (tmp_path / "direct.safetensors").read_bytes()
    assert content == (tmp_path / "relayed.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest


def test_slices_are_written_by_any_number_of_owners(
    rig: Rig, undisturbed: Outcome, lot: Gates, tmp_path: Path
) -> None:
    """The large momentum is cut among them, within its leaf."""
    received = states(rig, "received")
    digests = []
    for num_members in (3, 2, 1):
        run = rig.client.submit(SLICED)
        run.result()
        assert members(run) == num_members
        digests.append(committed(run))
        if num_members > 1:
            park(rig.cluster, lot, f"worker-{num_members - 1}")
            until(lambda n=num_members: len(rig.registered()) < n, "it has left")  # type: ignore[misc]
    lot.open()
    assert digests == 3 * [[*undisturbed.digests.values()]]
    assert states(rig, "received") == received, "nothing was relayed"
    run.download(tmp_path / "sliced.safetensors")
    whole = rig.client.submit(JOB)
    whole.result().download(tmp_path / "whole.safetensors")
    content = (tmp_path / "sliced.safetensors").read_bytes()
    assert content == (tmp_path / "whole.safetensors").read_bytes()


@BOTH_STORES
@pytest.mark.parametrize(
    "strategy", [SLICES, FULL, STAGES, GOSSIP], ids=["slices", "full", "stages", "nodes"]
)
def test_parts_are_put_together_by_those_that_hold_them(
    rig: Rig, store: LeafPlaceOutside, strategy: dict[str, Any]
) -> None:
    job = {**JOB, "strategy": strategy}
    received = states(rig, "received")
    written = rig.outcome(job)
    assert states(rig, "received") == received
    with nobody_can_write(store):
        relayed = rig.outcome(job)
    assert states(rig, "received") > received
    assert written.digests == relayed.digests
    until(lambda: has_no_garbage(store), "leaves that were kept were not written again for long")


def test_what_no_worker_can_write_is_relayed_and_is_the_same_state(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome
) -> None:
    received = states(rig, "received")
    with nobody_can_write(store):
        outcome = rig.outcome(JOB)
    assert outcome == undisturbed
    assert states(rig, "received") > received
    until(lambda: has_no_garbage(store), "leaves that were kept were not written again for long")


def test_leaves_that_have_not_changed_are_not_written_again(
    rig: Rig, store: LeafPlaceOutside
) -> None:
    frozen = {**crash_job(LOCAL, model="wide_middle", frozen=True), "seed": 99}
    before = {leaf for leaf, _ in store.uploads()}
    run = rig.client.submit(frozen)
    run.result()
    by_name = {state_of(each): each.digests for each in store.lists()}
    leaves = [by_name[digest] for digest in committed(run)]
    assert len(leaves) == 7
    assert len({each[0] for each in leaves}) == 1
    assert len({each[-1] for each in leaves}) == 7
    written = {leaf: name for leaf, name in store.uploads() if leaf not in before}
    # The first upload has written the frozen layer, and each one a leaf of all else.
    assert len(written) == 8
    assert len(set(written.values())) == 7


def state_of(listed: LeafList) -> str:
    """The digest of a state, which is that of its list."""
    return hashlib.sha256(list_bytes(listed.manifest, listed.digests)).hexdigest()


def test_signed_requests_that_are_refused_are_asked_for_again(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome
) -> None:
    """As when their time is over, or the store is busy, or the connection breaks."""
    if not isinstance(store, InBucket):
        pytest.skip("nothing is signed for a folder")
    received = states(rig, "received")
    troubles: list[tuple[int | str, ...]] = [(FORBIDDEN, UNAVAILABLE), (HALF, FORBIDDEN)]
    for each in troubles:  # fewer than are tried
        store.server.of_signed = [*each]
        assert rig.outcome(JOB) == undisturbed
        assert store.server.of_signed == []
    assert states(rig, "received") == received, "nothing was relayed"


def test_states_go_on_into_other_runs_and_out_again(
    rig: Rig, store: LeafPlaceOutside, tmp_path: Path
) -> None:
    first = rig.client.submit(JOB)
    state = first.result().state_dict()
    sent = states(rig, "sent")
    going_on: dict[str, Any] = {"initial": {"run": first.run_id}}
    begun = rig.client.submit({**JOB, **going_on, "steps": 4})
    assert begun.result().state_dict().keys() == state.keys()
    resumed = {**JOB, "initial": {"run": first.run_id, "resume": True}, "steps": 16}
    whole = rig.client.submit({**JOB, "steps": 16}).result().state_dict()
    assert_same_bits(rig.client.submit(resumed).result().state_dict(), whole)
    only = {**JOB, **NOT_TRAINED, **going_on, "strategy": LOCAL}
    only["evaluation"] = {"split": "test", "metrics": ["accuracy"]}
    evaluated = rig.client.submit({k: v for k, v in only.items() if v is not None}).result()
    assert evaluated.metrics["test.accuracy"] == first.metrics()["test.accuracy"]
    # The model's state_dict above was downloaded by this process, three times.
    taken = sum(each.nbytes for each in state.values())
    assert states(rig, "sent") - sent < 12 * taken
    backup = tmp_path / "backup"
    rig.client.back_up(backup)
    made = coordinator_settings(data_dir=tmp_path / "restored")
    if isinstance(store, InBucket):
        made = made.model_copy(update={"blob_store": f"s3://{BUCKET}/restored"})
    restore(RestoreSettings.model_construct(**dict(made), folder=backup))
    blobs = Storage.open(made).blobs(1_000_000)
    first.download(tmp_path / "first.safetensors")
    with blobs.open(Digest(committed(first)[-1])) as file:
        assert file.read() == (tmp_path / "first.safetensors").read_bytes()


Crash = tuple[str, str, int]
"""The process, the failpoint where it dies, and how often it passes that before."""
CASES = [
    ("worker-1", "worker.leaf.unnamed", 1),
    ("worker-0", "worker.leaf.untold", 3),
    ("coordinator", "coordinator.leaves.gathered", 2),
    ("coordinator", "coordinator.commit.pulled", 1),
]
MORE = [
    ("worker-0", "worker.leaf.unnamed", 0),
    ("worker-0", "worker.leaf.untold", 0),
    ("worker-2", "worker.leaf.untold", 0),
    ("coordinator", "coordinator.leaves.gathered", 0),
    ("coordinator", "coordinator.build.pulled", 0),
    ("coordinator", "coordinator.blobs.before_rename", 1),
    ("coordinator", "coordinator.blobs.after_rename", 1),
    ("coordinator", "coordinator.journal.before_commit", 6),
    ("coordinator", "coordinator.journal.after_commit", 6),
]


IN_BUCKET = {
    "worker.leaf.unnamed": "worker.leaf.half_sent",
    "worker.leaf.untold": "worker.leaf.stored",
    "coordinator.blobs.before_rename": "coordinator.objects.after_put",
    "coordinator.blobs.after_rename": "coordinator.objects.after_put",
}
"""What stands in a bucket for a failpoint of the folder."""


def placed(failpoint: str, store: LeafPlaceOutside) -> str:
    """The failpoint that is reached where states are in this place."""
    return IN_BUCKET.get(failpoint, failpoint) if isinstance(store, InBucket) else failpoint


def crashes(cases: Sequence[Crash], more: Sequence[Crash]) -> pytest.MarkDecorator:
    """The crashes of a test; more: those of the long tests."""
    long = (pytest.param(case, marks=pytest.mark.sweep) for case in more)
    return pytest.mark.parametrize("crash", [*cases, *long], ids=[*map(name_of, (*cases, *more))])


def name_of(crash: Crash) -> str:
    return "-".join(map(str, crash))


def outcome_after(rig: Rig, store: LeafPlaceOutside, job: dict[str, Any], crash: Crash) -> Outcome:
    """What becomes of a job in which a process dies; no leaf may be left that nothing needs."""
    process, failpoint, num_passed = crash
    with rig.armed(process, placed(failpoint, store), num_passed):
        outcome = rig.outcome(job)
    until(lambda: has_no_garbage(store), "all that nothing names is collected")
    return outcome


@BOTH_STORES
@crashes(CASES, MORE)
def test_a_crash_changes_no_bits_and_leaves_no_garbage(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome, crash: Crash
) -> None:
    assert outcome_after(rig, store, JOB, crash) == undisturbed


OF_OWNERS = [
    ("worker-0", "worker.pieces.asked", 1),
    ("worker-1", "worker.leaf.joined", 0),
    ("worker-2", "worker.leaf.unnamed", 1),
    ("coordinator", "coordinator.parts.described", 1),
    ("coordinator", "coordinator.leaves.gathered", 2),
]
MORE_OF_OWNERS = [
    ("worker-1", "worker.pieces.asked", 0),
    ("worker-0", "worker.leaf.joined", 2),
    ("worker-0", "worker.leaf.untold", 1),
    ("worker-2", "worker.leaf.untold", 0),
    ("coordinator", "coordinator.parts.described", 0),
    ("coordinator", "coordinator.commit.pulled", 1),
    ("coordinator", "coordinator.blobs.after_rename", 2),
]


OF_MIRRORED = [
    ("worker-0", "worker.pieces.asked", 1),
    ("worker-1", "worker.leaf.joined", 1),
    ("worker-2", "worker.leaf.unnamed", 1),
    ("worker-0", "worker.leaf.untold", 3),
]
"""Two leaves of the model that worker-0 has built are its first."""


@BOTH_STORES
@pytest.mark.parametrize(("process", "failpoint", "num_passed"), OF_MIRRORED)
def test_owners_with_mirrors_go_on_when_one_dies_in_a_commit(
    rig: Rig,
    store: LeafPlaceOutside,
    gates: Gates,
    process: str,
    failpoint: str,
    num_passed: int,
) -> None:
    data = user_data("gated", folder=str(gates.folder))
    job = {**JOB, "data": data, "strategy": slices()}
    expected = rig.outcome({**job, "strategy": ALL_REDUCE})
    with rig.armed(process, placed(failpoint, store), num_passed):
        outcome, run = outcome_of_held(rig, gates, job, process)
    assert outcome.digests == expected.digests
    assert_nothing_was_trained_twice(run)
    until(lambda: has_no_garbage(store), "all that nothing names is collected")


@BOTH_STORES
@crashes(OF_OWNERS, MORE_OF_OWNERS)
def test_a_crash_of_owners_changes_no_bits_and_leaves_no_garbage(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome, crash: Crash
) -> None:
    assert outcome_after(rig, store, SLICED, crash).digests == undisturbed.digests
