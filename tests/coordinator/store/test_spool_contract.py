"""What the spool promises wherever updates lie, and what it promises beside in an object store."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.tensors.files import read_header
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun
from tests.coordinator.store.places import Bucket, Place
from tests.coordinator.store.troubled import FORBIDDEN, troubled
from tests.coordinator.updates.coded import MODEL, CodedRound, job_with, mean, update_of
from tests.coordinator.updates.updates import (
    MIXED,
    OF_RUN,
    ROOT,
    RUN,
    accept,
    data_of,
    flip_bit,
    key,
    manifest_of,
    update_digest,
)
from tests.programs import run

MANIFEST = manifest_of(MIXED)
DATA = data_of(MANIFEST, 1)
OTHER_DATA = data_of(MANIFEST, 2)
WRITE = """
from stratagem.coordinator.store.bucket import open_s3
from stratagem.coordinator.updates.spool import SharedSpool
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.updates.updates import MIXED, accept, data_of, manifest_of
MANIFEST = manifest_of(MIXED)
shared = SharedSpool(open_s3(sys.argv[1], os.environ), 1)
spool = Spool(Path(sys.argv[2]), quota_bytes=1 << 20, shared=shared)
accept(spool, 0, MANIFEST, data_of(MANIFEST, 1), 5)
"""


def content_of(spool: Spool, client: int, digest: Digest | None = None) -> bytes:
    entry = spool.entry(key(client), digest)
    assert entry is not None
    return entry.path.read_bytes()[entry.data_start :]


def digest_of(data: bytes) -> Digest:
    return Digest(update_digest(data))


# ---- wherever they lie ----


def test_an_accepted_update_is_a_canonical_file_and_survives_its_coordinator(
    spool_place: Place,
) -> None:
    spool = spool_place.spool()
    writer = spool.open(key(3), MANIFEST)
    assert writer.offset == 0
    for start in range(0, len(DATA), 5):
        writer.write(DATA[start : start + 5])
    entry = writer.commit(MANIFEST, num_samples=17)
    writer.close()
    assert spool.entry(key(3)) == entry
    again = spool_place.spool()
    found = again.entry(key(3))
    assert found is not None
    assert again.entries(OF_RUN, ROOT, 1) == {3: found}
    assert again.entry(key(4)) is None
    for each in (entry, found):
        assert each.digest == update_digest(DATA)
        assert (each.num_samples, each.data_bytes) == (17, len(DATA))
        assert each.path.read_bytes()[each.data_start :] == DATA
        assert read_header(each.path)[0].stored() == MANIFEST.stored()
    assert again.look(key(3)) == (found, 0)
    second = accept(again, 3, MANIFEST, OTHER_DATA)
    assert again.entry(key(3)) == second
    assert content_of(spool_place.spool(), 3) == OTHER_DATA, "it has taken the place of the first"


def test_entries_come_in_client_order_and_go_with_their_round(spool_place: Place) -> None:
    spool = spool_place.spool()
    for client in (10, 2, 0):
        accept(spool, client, MANIFEST, DATA)
    other = SpoolKey(OF_RUN, Party("silo0/replica1"), 1, 5)
    writer = spool.open(other, MANIFEST)
    writer.write(DATA)
    writer.commit(MANIFEST, 1)
    spool = spool_place.spool()
    assert list(spool.entries(OF_RUN, ROOT, 1)) == [0, 2, 10]
    assert list(spool.entries(OF_RUN, other.party, 1)) == [5]
    spool.delete_updates([key(2), key(7)])
    assert list(spool.entries(OF_RUN, ROOT, 1)) == [0, 10]
    spool.delete_round(OF_RUN, ROOT, 1)
    assert spool.entries(OF_RUN, ROOT, 1) == {}
    assert spool.entry(key(0)) is None
    assert list(spool.entries(OF_RUN, other.party, 1)) == [5]
    spool.delete_run(OF_RUN)
    spool.delete_run(OF_RUN)
    assert spool_place.spool().entries(OF_RUN, other.party, 1) == {}


def test_files_of_runs_that_are_not_known_any_more_are_deleted(spool_place: Place) -> None:
    """But not those of runs that another coordinator, which leads now, has begun meanwhile."""
    accept(spool_place.spool(), 0, MANIFEST, DATA)
    spool = spool_place.spool()
    later = SpoolRun(RunId("another-1"))
    accept(spool_place.spool(), 0, MANIFEST, DATA, run=later)
    spool.clean([OF_RUN])
    assert spool_place.spool().entry(key(0)) is not None
    spool.clean([])
    assert spool_place.spool().entry(key(0)) is None
    assert spool_place.spool().entry(key(0, run=later)) is not None


AGAIN = SpoolRun(RUN, "b")


def test_a_run_does_not_meet_what_an_earlier_one_of_its_id_has_left(spool_place: Place) -> None:
    spool = spool_place.spool()
    first = SpoolRun(RUN, "a")
    for run_before in (OF_RUN, first):
        accept(spool, 0, MANIFEST, DATA, run=run_before)
    assert spool_place.spool().look(key(0, run=AGAIN)) == (None, 0)
    accept(spool, 0, MANIFEST, OTHER_DATA, run=AGAIN)
    spool.delete_run(first)  # late
    assert spool.entry(key(0, run=first)) is None
    spool = spool_place.spool()
    spool.clean([AGAIN])
    found = spool.entry(key(0, run=AGAIN))
    assert found is not None
    assert found.digest == digest_of(OTHER_DATA)
    assert spool.entry(key(0)) is None


def test_what_was_accepted_before_a_run_went_back_is_none_of_its_rounds(spool_place: Place) -> None:
    """A crash, or another coordinator's disk, may have left it; its base was another state."""
    spool = spool_place.spool()
    silo = SpoolKey(AGAIN, Party("silo0"), 2, 0)
    accept(spool, 0, MANIFEST, DATA, run=AGAIN)
    with closing(spool.open(silo, MANIFEST)) as writer:
        writer.write(DATA)
        writer.commit(MANIFEST, 5)
    returned = replace(AGAIN, num_returns=1)
    assert spool_place.spool().look(key(0, run=returned)) == (None, 0)
    accept(spool, 0, MANIFEST, OTHER_DATA, run=returned)
    spool.delete_returned(returned)  # late: a round of the present has begun
    assert spool.entry(key(0, run=AGAIN)) is None
    assert spool.entry(silo) is None
    found = spool_place.spool().look(key(0, run=returned))[0]
    assert found is not None
    assert found.digest == digest_of(OTHER_DATA)
    spool.delete_round(returned, ROOT, 1)
    assert spool.look(key(0, run=returned)) == (None, 0)


@pytest.mark.parametrize("party", ["verifier", "verifier/member0"])
def test_a_round_that_a_verifier_trains_again_has_its_own_updates(
    spool_place: Place, party: str
) -> None:
    """What an earlier execution has computed would be taken for the result of this one."""
    spool = spool_place.spool()
    first, second = (replace(AGAIN, num_repeats=number) for number in (1, 2))
    accept(spool, 0, MANIFEST, DATA, run=first)  # the run's own
    keys = [SpoolKey(each, Party(party), 1, 0) for each in (first, second)]
    with closing(spool.open(keys[0], MANIFEST)) as writer:
        writer.write(DATA)
        writer.commit(MANIFEST, 5)
    assert spool.look(keys[1]) == (None, 0)
    with closing(spool.open(keys[1], MANIFEST)) as writer:
        writer.write(OTHER_DATA)
        writer.commit(MANIFEST, 5)
    spool.delete_returned(second)
    assert spool.entry(keys[0]) is None
    found = spool_place.spool().entry(keys[1])
    assert found is not None
    assert found.digest == digest_of(OTHER_DATA)
    assert spool.entry(key(0, run=second)) is not None


def test_the_next_start_deletes_what_lay_there_before_a_run_went_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", quota_bytes=1 << 20)
    accept(spool, 0, MANIFEST, DATA, run=AGAIN)
    returned = replace(AGAIN, num_returns=12)
    accept(spool, 0, MANIFEST, DATA, run=returned)
    accept(spool, 1, MANIFEST, DATA, run=replace(AGAIN, num_returns=11))
    used_bytes = spool.used_bytes
    spool.clean([returned])
    assert spool.used_bytes == used_bytes // 3
    assert spool.entry(key(0, run=returned)) is not None


# ---- in an object store ----


@pytest.mark.parametrize(
    "failpoint", ["coordinator.objects.after_put", "coordinator.spool.before_rename"]
)
def test_what_the_store_has_is_accepted_and_the_rest_is_a_copy(
    bucket: Bucket, tmp_path: Path, failpoint: str
) -> None:
    # The first object is the store's trial.
    (tmp_path / failpoint).write_text("1" if failpoint.startswith("coordinator.objects") else "")
    assert run(WRITE, bucket.url, tmp_path / "spool", failpoints=tmp_path)[0] == 137
    bucket.num_coordinators = 1
    for spool in (bucket.spool(), bucket.spool(tmp_path / "spool")):
        entry = spool.entry(key(0))
        assert entry is not None
        assert (entry.digest, entry.num_samples) == (digest_of(DATA), 5)


def test_of_several_updates_of_a_client_the_journal_says_which(memory: Bucket) -> None:
    """Two coordinators have accepted different ones; the journal has the first one's."""
    first, second = memory.spool(), memory.spool()
    accept(first, 0, MANIFEST, DATA)
    accept(second, 0, MANIFEST, OTHER_DATA)
    for spool in (first, second, memory.spool()):
        assert content_of(spool, 0, digest_of(DATA)) == DATA
        assert content_of(spool, 0, digest_of(OTHER_DATA)) == OTHER_DATA
        assert spool.entry(key(0), Digest("crc32c:00000000")) is None


def test_a_coordinator_deletes_nothing_that_a_later_one_has_accepted(memory: Bucket) -> None:
    old, new = memory.spool(), memory.spool()
    accept(old, 0, MANIFEST, DATA)
    accept(new, 0, MANIFEST, DATA)
    accept(new, 1, MANIFEST, OTHER_DATA)
    old.delete_updates([key(0), key(1)])
    old.delete_round(OF_RUN, ROOT, 1)
    old.delete_run(OF_RUN)
    old.clean([])
    assert len(memory.names("spool")) == 2
    assert list(memory.spool().entries(OF_RUN, ROOT, 1)) == [0, 1]


def test_what_crashes_have_left_of_unknown_and_completed_runs_is_deleted(memory: Bucket) -> None:
    accept(memory.spool(), 0, MANIFEST, DATA)
    spool = memory.spool()
    accept(spool, 1, MANIFEST, DATA)
    spool.clean([OF_RUN])
    assert len(memory.names("spool")) == 2
    spool.clean([SpoolRun(RunId("another-1"))])  # but not what was accepted since this start
    assert list(memory.spool().entries(OF_RUN, ROOT, 1)) == [1]
    memory.spool().clean([])
    assert memory.names("spool") == []


def test_damage_is_found_and_the_client_is_asked_again(memory: Bucket) -> None:
    accept(memory.spool(), 0, MANIFEST, DATA)
    for at in (0, 20, -1):
        memory.damage_objects("spool", at)
        spool = memory.spool()
        with pytest.raises(IntegrityError, match="is damaged"):
            spool.entry(key(0), digest_of(DATA))
        assert spool.look(key(0)) == (None, 0)
        accept(spool, 0, MANIFEST, DATA)
        assert content_of(memory.spool(), 0, digest_of(DATA)) == DATA


def test_a_damaged_copy_is_fetched_again_once_it_is_distrusted(
    memory: Bucket, tmp_path: Path
) -> None:
    spool, folder_spool = memory.spool(), Spool(tmp_path / "folder", quota_bytes=1 << 20)
    for each in (spool, folder_spool):
        entry = accept(each, 0, MANIFEST, DATA)
        flip_bit(entry.path, -1)
        each.distrust([entry])
        assert entry.path.exists() == (each is folder_spool), "it would keep its part of the quota"
    assert content_of(spool, 0, digest_of(DATA)) == DATA
    assert folder_spool.entry(key(0)) is not None  # the only one there is


def test_what_the_store_does_not_take_is_not_accepted_and_not_sent_again(
    bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        spool = bucket.spool()
        writer = spool.open(key(0), MANIFEST, source="worker-0/a")
        writer.write(DATA)
        server.always = FORBIDDEN
        with pytest.raises(UnavailableError, match="object store: writing into spool/digits-1"):
            writer.commit(MANIFEST, 1)
        writer.close()
        server.always = None
        assert spool.look(key(0)) == (None, 0)  # of another source
        assert spool.look(key(0), "worker-0/a") == (None, len(DATA))
        writer = spool.open(key(0), MANIFEST, source="worker-0/a")
        assert writer.offset == len(DATA)
        writer.commit(MANIFEST, 1)
        assert content_of(bucket.spool(), 0) == DATA


def test_a_fetched_update_counts_towards_the_quota(memory: Bucket) -> None:
    accept(memory.spool(), 0, MANIFEST, DATA)
    memory.objects().put(f"spool/{RUN}/root/1/1/README", [b"x"], 1)  # which is no update
    assert list(memory.spool().entries(OF_RUN, ROOT, 1)) == [0]
    with pytest.raises(UnavailableError, match="does not fit"):
        memory.spool(quota_bytes=10).entry(key(0))


def test_a_coded_update_is_folded_on_another_machine_to_the_same_bits(
    memory: Bucket, tmp_path: Path
) -> None:
    spec = job_with({"codec": "ternary"})
    updates = [update_of(spec, client) for client in range(3)]
    first = CodedRound(tmp_path, spec, spool=memory.spool())
    entries = [first.enter(client, update) for client, update in enumerate(updates[:2])]
    second = CodedRound(tmp_path, spec, spool=memory.spool())
    found = [second.spool.entry(key(client), entries[client].digest) for client in range(2)]
    assert [each and each.is_coded for each in found] == [True, True]
    last = second.enter(2, updates[2])
    folded = second.fold([*(each for each in found if each), last], [3, 2, 1])
    assert folded == mean(MODEL, [update.whole for update in updates], [3, 2, 1])
    memory.damage_objects("spool", -1)
    with pytest.raises(IntegrityError, match="is damaged"):
        memory.spool().entry(key(0), entries[0].digest)
