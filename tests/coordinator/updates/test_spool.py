from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    StaleError,
    UnavailableError,
)
from stratagem.common.base.ids import Party, RunId
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun
from stratagem.coordinator.updates.upload import DataCheck, UpdateRejectedError, check_layout
from tests.coordinator.updates.updates import (
    MIXED,
    OF_RUN,
    ROOT,
    RUN,
    Layout,
    accept,
    arrays,
    data_of,
    flip_bit,
    key,
    manifest_of,
    update_digest,
)
from tests.every_pair import every_value
from tests.programs import run

MIB = 1 << 20
MANIFEST = manifest_of(MIXED)
DATA = data_of(MANIFEST, 1)
PREAMBLE = """
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.updates.updates import MIXED, data_of, key, manifest_of, update_digest
MANIFEST = manifest_of(MIXED)
DATA = data_of(MANIFEST, 1)
spool = Spool(Path(sys.argv[1]), quota_bytes=1 << 20)
writer = spool.open(key(0), MANIFEST)
"""


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return reopened(tmp_path)


def reopened(tmp_path: Path, quota_bytes: int = MIB) -> Spool:
    return Spool(tmp_path / "spool", quota_bytes=quota_bytes)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "spool").rglob("*") if path.is_file())


@pytest.mark.parametrize("cut", [0, 1, 100, len(DATA)])
def test_a_closed_upload_goes_on_where_it_was_cut(tmp_path: Path, spool: Spool, cut: int) -> None:
    writer = spool.open(key(0), MANIFEST)
    writer.write(DATA[:cut])
    writer.close()
    writer = reopened(tmp_path).open(key(0), MANIFEST)
    assert writer.offset == cut
    writer.write(DATA[cut:])
    assert writer.commit(MANIFEST, 1).digest == update_digest(DATA)
    left = [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]
    assert [path.stat().st_mode & 0o777 for path in left] == [0o600, 0o600]


def test_a_sender_may_start_too_early_but_not_too_late(tmp_path: Path, spool: Spool) -> None:
    writer = spool.open(key(0), MANIFEST)
    writer.write_at(0, DATA[:100])
    writer.close()
    spool.delete_round(OF_RUN, ROOT, 2)
    assert spool.likely_offset(key(1)) == 0
    assert spool.likely_offset(key(0)) == 100, "what is left of another round is none of its"
    writer = spool.open(key(0), MANIFEST)
    for start in range(0, 150, 30):
        writer.write_at(start, DATA[start : start + 30])
    assert writer.offset == 150
    with pytest.raises(IntegrityError, match="from 151 on came, those from 150 are wanted"):
        writer.write_at(151, DATA[151:])
    writer.write_at(0, DATA)
    assert writer.commit(MANIFEST, 1).digest == update_digest(DATA)
    assert spool.likely_offset(key(0)) == 0


def damage_note(folder: Path, content: str) -> None:
    (note,) = folder.rglob("*.progress")
    note.write_text(content)


def damage_data(folder: Path, at: int) -> None:
    (path,) = folder.rglob("*.safetensors")
    flip_bit(path, at)


@pytest.mark.parametrize("how", [3, 500, -1, "", "{", "{}", '{"identity": 1, "num_bytes": 2}'])
def test_an_upload_whose_beginning_or_note_is_damaged_starts_anew(
    tmp_path: Path, spool: Spool, how: int | str
) -> None:
    writer = spool.open(key(0), MANIFEST)
    writer.write(DATA[:-1])
    writer.close()
    if isinstance(how, int):
        damage_data(tmp_path / "spool", how)
    else:
        damage_note(tmp_path / "spool", how)
    writer = spool.open(key(0), MANIFEST)
    assert writer.offset == 0
    writer.write(DATA)
    assert writer.commit(MANIFEST, 1).digest == update_digest(DATA)


def test_an_upload_goes_on_only_from_the_same_source_and_manifest(spool: Spool) -> None:
    def cut_then_open(manifest: Manifest, source: str) -> int:
        writer = spool.open(key(0), MANIFEST, source="worker-0/a")
        writer.write(DATA[: 100 - writer.offset])
        writer.close()
        again = spool.open(key(0), manifest, source=source)
        offset = again.offset
        again.close()
        return offset

    assert cut_then_open(MANIFEST, "worker-0/a") == 100
    assert cut_then_open(MANIFEST, "worker-0/b") == 0
    assert spool.likely_offset(key(0)) == 0
    assert cut_then_open(replace(MANIFEST, metadata={"step": "2"}), "worker-0/a") == 0


def test_a_later_upload_takes_the_place_of_one_that_is_still_open(
    tmp_path: Path, spool: Spool
) -> None:
    frozen = spool.open(key(0), MANIFEST)
    frozen.write(DATA)
    taken = reopened(tmp_path).open(key(0), MANIFEST)
    assert taken.offset == 0
    with pytest.raises(StaleError, match="later upload"):
        frozen.commit(MANIFEST, 1)
    frozen.close()
    taken.write(DATA)
    assert spool.entry(key(0)) is None
    entry = taken.commit(MANIFEST, 2)
    assert spool.entry(key(0)) == entry


A, B, C = ("a", "float32", (2, 3)), ("b", "int64", ()), ("c", "bool", ())


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((A, ("c", "int64", ())), "tensor 1 is 'c', expected 'b'"),
        ((B, A), "tensor 0 is 'b', expected 'a'"),
        ((("a", "float32", (3, 2)), B), r"'a' has shape \(3, 2\), expected \(2, 3\)"),
        ((("a", "float16", (2, 3)), B), "'a' has dtype float16, expected float32"),
        ((A,), "1 tensors, expected 2: 'b' is missing"),
        ((A, B, C), "3 tensors, expected 2: 'c' is extra"),
    ],
)
def test_another_layout_is_rejected_with_the_first_difference(
    tmp_path: Path, spool: Spool, layout: Layout, reason: str
) -> None:
    manifest = manifest_of(layout)
    writer = spool.open(key(0), manifest)
    writer.write(data_of(manifest, 1))
    with pytest.raises(UpdateRejectedError, match=reason) as raised:
        writer.commit(manifest_of((A, B)), 1)
    assert (str(raised.value), raised.value.cause) == (raised.value.reason, Cause.LAYOUT)
    assert files(tmp_path) == []
    assert spool.entry(key(0)) is None


def test_other_tied_parameters_are_another_layout() -> None:
    layout = (("a", "float32", (2,)), ("b", "float32", (2,)), ("c", "float32", (2,)))
    tied = manifest_of(layout, aliases={"c": "a"})
    check_layout(tied, tied)
    with pytest.raises(UpdateRejectedError, match="share their storage"):
        check_layout(tied, manifest_of(layout, aliases={"c": "b"}))


@pytest.mark.parametrize(
    ("name", "chunk_bytes"),
    every_value(
        [f"model/{name}" for name in ("w32", "w64", "h16", "b16", "e4", "e5")], [1, 3, 1000]
    ),
)
def test_one_value_that_is_not_finite_rejects_the_update_by_name(
    tmp_path: Path, spool: Spool, name: str, chunk_bytes: int
) -> None:
    tensors = arrays(MANIFEST, 1)
    tensors[name].view(np.uint8)[-tensors[name].itemsize :] = 0xFF  # not a number in every type
    data = b"".join(raw.tobytes() for raw in tensors.values())
    writer = spool.open(key(0), MANIFEST)

    def write_all() -> None:
        for start in range(0, len(data), chunk_bytes):
            writer.write(data[start : start + chunk_bytes])

    with pytest.raises(UpdateRejectedError, match=f"values of '{name}' are not finite"):
        write_all()
    assert files(tmp_path) == []
    writer.close()


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=20), bad=st.booleans())
def test_how_the_data_are_cut_does_not_matter(cuts: list[int], bad: bool) -> None:
    spec = MANIFEST.tensors[2]
    data = bytearray(DATA)
    if bad:
        data[spec.offset + 8 : spec.offset + 16] = np.array([np.inf], "<f8").tobytes()
    whole, pieces = DataCheck(MANIFEST), DataCheck(MANIFEST)
    bounds = [0, *sorted(cuts), len(data)]

    def see_pieces() -> None:
        for start, stop in pairwise(bounds):
            pieces.see(memoryview(data)[start:stop])

    if bad:
        with pytest.raises(UpdateRejectedError, match="'model/w64'"):
            see_pieces()
    else:
        see_pieces()
        whole.see(memoryview(data))
        assert (pieces.crc32c, pieces.num_bytes) == (whole.crc32c, whole.num_bytes)


@pytest.mark.parametrize("cut", [1, 4, 7, 16])
def test_what_was_not_finite_before_may_stay_so_and_nothing_else(cut: int) -> None:
    """A mask of infinities is a buffer of the model's; whatever pieces it comes in."""
    before = np.array([-np.inf, 1.0, np.nan, 2.0], "<f4")
    manifest = manifest_of([("mask", "float32", (4,))])
    known = before.view(np.uint8)

    def see(values: list[float]) -> None:
        check = DataCheck(manifest, lambda _, offset, num: known[offset : offset + num])
        data = memoryview(np.array(values, "<f4").tobytes())
        for start in range(0, len(data), cut):
            check.see(data[start : start + cut])

    see([-np.inf, 3.0, np.nan, 2.0])
    for wrong in ([np.inf, 1.0, np.nan, 2.0], [-np.inf, np.nan, np.nan, 2.0]):
        with pytest.raises(UpdateRejectedError, match="not finite"):
            see(wrong)


def test_what_was_announced_must_be_true(tmp_path: Path, spool: Spool) -> None:
    writer = spool.open(key(0), MANIFEST)
    with pytest.raises(UpdateRejectedError, match="more than the announced") as raised:
        writer.write(DATA + b"1")
    assert raised.value.cause is Cause.SIZE
    accept(spool, 0, MANIFEST, DATA)
    writer = spool.open(key(1), MANIFEST)
    writer.write(DATA)
    with pytest.raises(UpdateRejectedError, match="num_samples is 0"):
        writer.commit(MANIFEST, 0)
    assert len(files(tmp_path)) == 2


def test_an_update_that_is_not_complete_can_go_on(spool: Spool) -> None:
    writer = spool.open(key(0), MANIFEST)
    writer.write(DATA[:-1])
    with pytest.raises(IntegrityError, match=f"{len(DATA) - 1} of {len(DATA)} bytes"):
        writer.commit(MANIFEST, 1)
    writer.write(DATA[-1:])
    writer.commit(MANIFEST, 1)


def test_the_quota_counts_what_is_announced_also_after_a_restart(tmp_path: Path) -> None:
    size = len(header_bytes(MANIFEST)) + len(DATA)
    spool = reopened(tmp_path, quota_bytes=3 * size)
    accept(spool, 0, MANIFEST, DATA)
    accept(spool, 0, MANIFEST, DATA)
    assert len(files(tmp_path)) == 2, "the second takes the place of the first"
    for client in (1, 2):
        spool.open(key(client), MANIFEST).close()
    with pytest.raises(UnavailableError, match=f"{3 * size} of {3 * size} bytes are in use"):
        spool.open(key(3), MANIFEST)
    accept(spool, 2, MANIFEST, DATA)
    spool = reopened(tmp_path, quota_bytes=2 * size)
    with pytest.raises(UnavailableError):
        spool.open(key(4), MANIFEST)
    spool.delete_round(OF_RUN, ROOT, 1)
    accept(spool, 4, MANIFEST, DATA)
    spool.delete_updates([key(4)])
    assert (spool.used_bytes, files(tmp_path)) == (0, [])


def test_names_that_are_no_names_never_reach_the_disk(spool: Spool) -> None:
    for party in ("..", "a/../b", "/a", "a//b", "a.b"):
        with pytest.raises(InvalidInputError, match="party"):
            spool.open(SpoolKey(OF_RUN, Party(party), 1, 0), MANIFEST)
    with pytest.raises(InvalidInputError, match="run_id"):
        spool.open(key(0, run=SpoolRun(RunId("../x"))), MANIFEST)
    with pytest.raises(InvalidInputError, match="submission"):
        spool.open(key(0, run=SpoolRun(RUN, "../x")), MANIFEST)


@pytest.mark.parametrize(
    ("failpoint", "is_accepted"),
    [("coordinator.spool.before_rename", False), ("coordinator.spool.after_rename", True)],
)
def test_a_crash_at_the_rename_accepts_all_or_nothing(
    tmp_path: Path, failpoint: str, is_accepted: bool
) -> None:
    (tmp_path / failpoint).touch()
    code = PREAMBLE + "writer.write(DATA); writer.close(); writer = spool.open(key(0), MANIFEST)\n"
    code += "writer.commit(MANIFEST, 5)"
    assert run(code, tmp_path / "spool", failpoints=tmp_path)[0] == 137
    spool = reopened(tmp_path)
    entry = spool.entry(key(0))
    if entry is None:
        writer = spool.open(key(0), MANIFEST)
        assert writer.offset == len(DATA)
        entry = writer.commit(MANIFEST, 5)
        assert not is_accepted
    else:
        assert is_accepted
    assert (entry.digest, entry.num_samples) == (update_digest(DATA), 5)
    assert entry.path.read_bytes()[entry.data_start :] == DATA


def test_a_crash_between_checkpoints_goes_on_at_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "coordinator.spool.after_checkpoint").write_text("1")
    code = (
        "from stratagem.coordinator.updates import upload\n"
        "upload.CHECKPOINT_BYTES = 100\n"
        + PREAMBLE
        + "for start in range(len(DATA)):\n    writer.write(DATA[start:start + 1])"
    )
    assert run(code, tmp_path / "spool", failpoints=tmp_path)[0] == 137
    writer = reopened(tmp_path).open(key(0), MANIFEST)
    assert writer.offset > 0
    writer.write(DATA[writer.offset :])
    assert writer.commit(MANIFEST, 1).digest == update_digest(DATA)


def test_a_full_disk_leaves_an_upload_that_can_go_on(tmp_path: Path) -> None:
    code = """
from stratagem.common.base.errors import UnavailableError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spool = Spool(Path(sys.argv[1]), quota_bytes=1 << 30)
layout = manifest_of([("w", "float32", (100_000,))])
data = data_of(layout, 1)
writer = spool.open(key(1), layout)
writer.write(data[:150_000])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
try:
    writer.write(data[150_000:])
except UnavailableError as error:
    print(error)
writer.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer = spool.open(key(1), layout)
print(writer.offset)
writer.write(data[writer.offset:])
print(writer.commit(layout, 1).digest == update_digest(data))
"""
    _, out = run(PREAMBLE + code, tmp_path / "spool")
    message, offset, is_equal = out.splitlines()
    assert message.startswith("the coordinator's disk is full")
    assert 150_000 <= int(offset) <= 200_000
    assert is_equal == "True"
