"""States that workers write by themselves: one digest for any number of them, no byte twice, the
same bits whatever dies, and no leaf left that nothing needs.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.sdk.blocking import RunHandle
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafList, list_bytes
from stratagem.coordinator.app.storage import Storage
from stratagem.coordinator.process.restore import RestoreSettings, restore
from tests.cluster.jobs import Gates, assert_same_bits, gates_in, park
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.coordinator.store.troubled import FORBIDDEN, HALF, UNAVAILABLE
from tests.crash.failure_logs import LOGS
from tests.crash.jobs import ALL_REDUCE, GOSSIP, LOCAL, PIPELINE, crash_job, slices
from tests.crash.leaf_stores import InBucket, InFolder, LeafPlaceOutside, in_bucket
from tests.crash.rig import Outcome, Rig, cluster_with_failpoints, until
from tests.crash.whole_runs import assert_nothing_was_trained_twice, outcome_of_held
from tests.jobs import NOT_TRAINED, user_data
from tests.patience import PATIENCE_S
from tests.repository import ROOT
from tests.settings import coordinator_settings

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.promise("Workers write a state themselves, and whatever dies, it is the same one."),
]

PARKABLE_WORKER = ROOT / "tests" / "cluster" / "parkable_worker.py"
JOB = crash_job(ALL_REDUCE, model="wide_middle", every=4)
"""Its state has three leaves: of the large layer, of its momentum, and of all else."""
SLICES = slices(mirror=0)
FULL = slices(partition_state="full")
SLICED = {**JOB, "strategy": SLICES}
IN_FOLDER = pytest.mark.parametrize("store", ["folder"], indirect=True, scope="module")
IN_BUCKET = pytest.mark.parametrize("store", ["bucket"], indirect=True, scope="module")
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


@pytest.fixture(scope="module")
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
    cluster = cluster_with_failpoints(
        data_dir=data_dir,
        programs={
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, str(PARKABLE_WORKER)],
        },
        environment={
            "TEST_PARKING": str(lot.folder),
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
    received = states(direct_rig, "received")
    outcome = direct_rig.outcome(JOB)
    assert states(direct_rig, "received") == received, "nothing was relayed"
    return outcome


def has_no_garbage(store: LeafPlaceOutside) -> bool:
    """Whether each leaf that is there is once there, and named by the list of a state."""
    named = sorted({leaf for each in store.lists() for leaf in each.digests})
    return sorted(leaf for leaf, _ in store.uploads()) == named and not store.has_parts()


def states(rig: Rig, direction: str) -> float:
    """Bytes of states that have passed the coordinator."""
    flows = scraped(rig.cluster, "coordinator")["stratagem_stream_bytes_total"]
    return flows.get(labelled(direction=direction, kind="state"), 0.0)


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("store", "job"), [("folder", JOB), ("bucket", SLICED)], indirect=["store"], scope="module"
)
def test_any_number_of_workers_writes_the_same_state(
    rig: Rig,
    shared_rig: Rig,
    store: LeafPlaceOutside,
    undisturbed: Outcome,
    lot: Gates,
    tmp_path: Path,
    job: dict[str, Any],
) -> None:
    """Of slices, the large momentum is cut among them, within its leaf; the file is the one that
    is relayed."""
    before = states(rig, "received"), states(rig, "sent")
    runs = []
    for num_members in (3, 2, 1):
        run = rig.client.submit(job)
        run.result()
        assert members(run) == num_members
        runs.append(run)
        if num_members > 1:
            park(rig.cluster, lot, f"worker-{num_members - 1}")
            until(lambda n=num_members: len(rig.registered()) < n, "it has left")  # type: ignore[misc]
    lot.open()
    assert [committed(run) for run in runs] == 3 * [[*undisturbed.digests.values()]]
    assert (states(rig, "received"), states(rig, "sent")) == before, "nothing was relayed"
    assert len({upload for _, upload in store.uploads()}) > 1
    run.download(tmp_path / "direct.safetensors")
    content = (tmp_path / "direct.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert digest not in committed(run)
    relayed = shared_rig.client.submit(JOB)
    relayed.result().download(tmp_path / "relayed.safetensors")
    assert [each.digest for each in relayed.status().commits if each.is_final] == [digest]
    assert content == (tmp_path / "relayed.safetensors").read_bytes()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("store", "strategy"),
    [
        pytest.param("folder", ALL_REDUCE, id="folder-whole"),
        pytest.param("folder", SLICES, id="folder-slices"),
        pytest.param("folder", GOSSIP, id="folder-nodes"),
        pytest.param("bucket", FULL, id="bucket-full"),
        pytest.param("bucket", STAGES, id="bucket-stages"),
    ],
    indirect=["store"],
    scope="module",
)
def test_parts_are_put_together_by_those_that_hold_them(
    rig: Rig, store: LeafPlaceOutside, strategy: dict[str, Any]
) -> None:
    """What no worker can write is relayed, and is the same state."""
    job = {**JOB, "strategy": strategy}
    received = states(rig, "received")
    written = rig.outcome(job)
    assert states(rig, "received") == received
    with nobody_can_write(store):
        relayed = rig.outcome(job)
    assert states(rig, "received") > received
    assert written.digests == relayed.digests
    until(lambda: has_no_garbage(store), "leaves that were kept were not written again for long")


@pytest.mark.sweep
@IN_BUCKET
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


@pytest.mark.sweep
@IN_BUCKET
def test_signed_requests_that_are_refused_are_asked_for_again(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome
) -> None:
    """As when their time is over, or the store is busy, or the connection breaks."""
    assert isinstance(store, InBucket)
    received = states(rig, "received")
    troubles: list[tuple[int | str, ...]] = [(FORBIDDEN, UNAVAILABLE), (HALF, FORBIDDEN)]
    for each in troubles:  # fewer than are tried
        store.server.of_signed = [*each]
        assert rig.outcome(JOB) == undisturbed
        assert store.server.of_signed == []
    assert states(rig, "received") == received, "nothing was relayed"


@pytest.mark.sweep
@IN_FOLDER
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
    restore(RestoreSettings.model_construct(**dict(made), folder=backup))
    blobs = Storage.open(made).blobs(1_000_000)
    first.download(tmp_path / "first.safetensors")
    with blobs.open(Digest(committed(first)[-1])) as file:
        assert file.read() == (tmp_path / "first.safetensors").read_bytes()


KILLS: list[tuple[str, Any, list[str]]] = [
    ("folder", JOB, ["worker-0 leaf.untold 0", "coordinator leaves.gathered 2"]),
    ("folder", SLICED, ["worker-1 leaf.joined 0", "coordinator commit.pulled 1"]),
    ("folder", SLICED, ["worker-2 leaf.unnamed 1", "coordinator parts.described 1"]),
    ("bucket", JOB, ["worker-1 leaf.half_sent 1", "coordinator build.pulled 0"]),
    ("bucket", JOB, ["worker-0 leaf.stored 3", "coordinator objects.after_put 1"]),
    ("bucket", SLICED, ["worker-0 pieces.asked 1", "coordinator leaves.gathered 2"]),
]
"""The process, its failpoint where it dies, and how often it passes that before: each failpoint of
workers that write states, and a kill of the coordinator in the same run."""
ALONE = [
    *((store, job, [kill]) for store, job, kills in KILLS for kill in kills),
    ("folder", JOB, ["coordinator blobs.before_rename 1"]),
    ("folder", JOB, ["coordinator journal.before_commit 6"]),
    ("folder", SLICED, ["coordinator blobs.after_rename 2"]),
    ("bucket", JOB, ["coordinator commit.pulled 1"]),
    ("bucket", JOB, ["coordinator journal.after_commit 6"]),
    ("bucket", SLICED, ["worker-2 leaf.stored 0"]),
]


@pytest.mark.parametrize(
    ("store", "job", "kills"),
    [
        pytest.param("folder", JOB, ["worker-1 leaf.unnamed 1"], marks=pytest.mark.cluster),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in KILLS),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ALONE),
    ],
    indirect=["store"],
    ids=lambda value: (
        ("whole", "slices")[value is SLICED]
        if isinstance(value, dict)
        else ",".join(value).replace(" ", "-")
        if isinstance(value, list)
        else None
    ),
    scope="module",
)
def test_a_crash_changes_no_bits_and_leaves_no_garbage(
    rig: Rig, store: LeafPlaceOutside, undisturbed: Outcome, job: dict[str, Any], kills: list[str]
) -> None:
    with ExitStack() as armed:
        for process, name, num_passed in map(str.split, kills):
            failpoint = f"{process.partition('-')[0]}.{name}"
            armed.enter_context(rig.armed(process, failpoint, int(num_passed)))
        outcome = rig.outcome(job)
    assert outcome.digests == undisturbed.digests
    assert job is not JOB or outcome == undisturbed
    until(lambda: has_no_garbage(store), "all that nothing names is collected")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("store", "process", "failpoint", "num_passed"),
    [
        ("folder", "worker-0", "worker.pieces.asked", 1),
        ("bucket", "worker-2", "worker.leaf.half_sent", 1),
    ],
    indirect=["store"],
    scope="module",
)
def test_owners_with_mirrors_go_on_when_one_dies_in_a_commit(
    rig: Rig,
    store: LeafPlaceOutside,
    gates: Gates,
    process: str,
    failpoint: str,
    num_passed: int,
) -> None:
    """Two leaves of the model that worker-0 has built are its first."""
    data = user_data("gated", folder=str(gates.folder))
    job = {**JOB, "data": data, "strategy": slices()}
    expected = rig.outcome({**job, "strategy": ALL_REDUCE})
    with rig.armed(process, failpoint, num_passed):
        outcome, run = outcome_of_held(rig, gates, job, process)
    assert outcome.digests == expected.digests
    assert_nothing_was_trained_twice(run)
    until(lambda: has_no_garbage(store), "all that nothing names is collected")
