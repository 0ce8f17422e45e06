"""Coded updates in the spool: what is taken, what is rejected alone, and what the fold makes."""

import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.updates import fold, reading
from stratagem.coordinator.updates.fold import fold_weighted_mean
from stratagem.coordinator.updates.reading import CheckedData
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.upload import UpdateRejectedError
from stratagem.worker.federated.client_trainer import ClientRound
from stratagem.worker.plans.client_round import coded_update
from stratagem.worker.session.states import Frozen
from tests.common.compression.support import CODECS
from tests.coordinator.updates.coded import (
    MODEL,
    STATE,
    TERNARY,
    TRAINED,
    CodedRound,
    Update,
    job_with,
    mean,
    update_of,
)
from tests.coordinator.updates.updates import (
    arrays,
    data_of,
    flip_bit,
    key,
    manifest_of,
    update_digest,
)

FEDERATED = {
    name: codec
    for name, codec in CODECS.items()
    if name != "none" and "error_feedback" not in codec  # which clients have no state for
}
"""Clients keep no residuals, so there is no feedback."""


@pytest.fixture
def a_round(tmp_path: Path) -> CodedRound:
    return CodedRound(tmp_path, TERNARY)


def files(root: Path) -> list[Path]:
    return [path for path in (root / "spool").rglob("*") if path.is_file()]


# ---- every codec ----


@pytest.mark.parametrize("name", FEDERATED)
def test_a_fold_of_coded_updates_has_the_bits_of_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 13)
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 4 * 13)
    a_round = CodedRound(tmp_path, job_with(FEDERATED[name]))
    updates = [update_of(a_round.spec, client) for client in range(3)]
    entries = [a_round.enter(client, update) for client, update in enumerate(updates)]
    expected = mean(MODEL, [update.whole for update in updates], [3, 2, 1])
    assert a_round.fold(entries, [3, 2, 1]) == expected


@pytest.mark.parametrize("name", ["ternary", "vsa"])
def test_an_update_is_spooled_as_it_was_sent_or_decoded_if_it_has_no_windows(
    tmp_path: Path, name: str
) -> None:
    a_round = CodedRound(tmp_path, job_with(FEDERATED[name]))
    update = update_of(a_round.spec, 0)
    entry = a_round.enter(0, update)
    expected = update.data if name == "ternary" else update.whole
    assert entry.path.read_bytes()[entry.data_start :] == expected
    assert entry.digest == update_digest(expected)
    assert entry.is_coded == (name == "ternary")
    found = Spool(tmp_path / "spool", quota_bytes=1 << 30)
    assert found.entry(key(0)) == entry
    assert found.used_bytes == entry.data_start + len(expected)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("name", ["bf16", "ternary", "top_k", "low_rank", "vsa-int8"])
def test_a_round_that_an_earlier_version_began_ends_with_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    """It has spooled updates decoded; those that come later are spooled as they come. The windows
    are as large as the tensors."""
    a_round = CodedRound(tmp_path, job_with(FEDERATED[name]))
    updates = [update_of(a_round.spec, client) for client in range(4)]
    for client in (0, 2):
        a_round.enter_as_before(client, updates[client])
    again = CodedRound(tmp_path, a_round.spec)
    assert again.spool.look(key(0), "worker-0/a")[0] is not None
    for client in (1, 3):
        again.enter(client, updates[client])
    entries = [again.spool.entry(key(client)) for client in range(4)]
    expected = mean(MODEL, [update.whole for update in updates], [9, 2, 1, 5])
    assert again.fold([each for each in entries if each], [9, 2, 1, 5]) == expected


def test_an_upload_that_an_earlier_version_began_starts_anew(tmp_path: Path) -> None:
    """Its note counts bytes of the decoded update, more than the coded one has."""
    a_round = CodedRound(tmp_path, TERNARY)
    update = update_of(TERNARY, 0)
    writer = a_round.spool.open(key(0), replace(MODEL, metadata={}), source="decoded worker-0/a")
    writer.write(update.whole[:-1])
    writer.close()
    (note,) = (tmp_path / "spool").rglob("*.progress")
    note.write_text(note.read_text().replace(', "source": "decoded worker-0/a"', ""))
    again = CodedRound(tmp_path, TERNARY)
    assert again.spool.look(key(0), "worker-0/a") == (None, 0)
    entry = again.enter(0, update)
    assert again.fold([entry], [1]) == update.whole


def test_late_updates_count_by_what_they_moved_from_their_own_base(tmp_path: Path) -> None:
    old, older = 101, 102
    results = set()
    for is_coded in (True, False):
        a_round = CodedRound(tmp_path / str(is_coded), TERNARY, (STATE, old, older))
        bases = (older, STATE, old, STATE)
        entries = []
        for client, base in enumerate(bases):
            update = update_of(TERNARY, client, base)
            if is_coded:
                entries.append(a_round.enter(client, update, base))
            else:
                entries.append(a_round.enter_as_before(client, update))
        results.add(a_round.fold(entries, [0.5, 3, 0.25, 1], bases))
    assert len(results) == 1


def test_updates_with_other_tensors_coded_are_folded_together(tmp_path: Path) -> None:
    """A client may send what it has not trained, or what is not finite coded, as it is."""
    a_round = CodedRound(tmp_path, TERNARY)
    coded = update_of(TERNARY, 0)
    plain = data_of(MODEL, 1)
    wire = build_manifest(
        [(each.name, each.dtype, each.shape) for each in MODEL.stored()], Purpose.UPDATE
    )
    entries = [a_round.enter(0, coded), a_round.enter(1, Update(wire, plain, plain))]
    assert [each.is_coded for each in entries] == [True, False]
    assert a_round.fold(entries, [2, 1]) == mean(MODEL, [coded.whole, plain], [2, 1])


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 1 << 12)
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 4 << 12)
    model = manifest_of([("model/a", "float32", (3 << 18,))])
    a_round = CodedRound(tmp_path, TERNARY, model=model)
    updates = [update_of(TERNARY, client, model=model) for client in range(2)]
    writer = a_round.store.writer(len(header_bytes(model)) + model.total_bytes)
    tracemalloc.start()
    try:
        entries = [a_round.enter(client, update) for client, update in enumerate(updates)]
        fold_weighted_mean(entries, [1, 1], model, writer, decoding=a_round.decoding([STATE] * 2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < model.total_bytes / 2


# ---- what is rejected ----


def trained_client(moved: torch.Tensor) -> Frozen | None:
    """The update of a worker whose client has moved one of its tensors."""
    before = {"model/weight": torch.arange(21.0).reshape(3, 7), "model/count": torch.tensor(4)}
    after = {**before, "model/weight": before["model/weight"] + moved}
    done = ClientRound(after, 5, 0.1, 1, {}, frozenset({"model/weight"}), 1)
    coded = coded_update(job_with({"codec": "int8"}), done, before, 1, 0)
    return None if coded is None else coded[0]


def test_what_a_worker_sends_is_taken(tmp_path: Path) -> None:
    model = manifest_of([("model/count", "int64", ()), ("model/weight", "float32", (3, 7))])
    a_round = CodedRound(tmp_path, job_with({"codec": "int8"}), model=model)
    assert trained_client(torch.full((3, 7), float("inf"))) is None, "it is sent as it is"
    frozen = trained_client(torch.full((3, 7), 127.0))
    assert frozen is not None
    data = b"".join(bytes(buffer) for buffer in frozen.buffers)
    entry = a_round.enter(0, Update(frozen.manifest, data, b""))
    weight = np.frombuffer(a_round.fold([entry], [5])[8:], "<f4")
    assert weight.tolist() == (arrays(model, STATE)["model/weight"] + np.float32(127)).tolist()


def layout_of(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with the payload, or another tensor, of another type, shape or name."""
    named = [
        changes.get(each.name, (each.name, each.dtype, each.shape)) for each in manifest.tensors
    ]
    return build_manifest([each for each in named if each], Purpose.UPDATE, codec=manifest.codec)


def wrong_updates(update: Update) -> list[tuple[Update, Cause, str]]:
    manifest, size = update.manifest, update.manifest.tensors[-1].size_bytes
    flags = layout_of(manifest, **{"model/mask": ("model/mask", "int8", (3,))})
    other = layout_of(manifest, **{"model/mask": ("model/other", "bool", (3,))})
    short = layout_of(manifest, payload=("payload", "uint8", (size - 1,)))
    missing = layout_of(manifest, payload=None)
    wide = layout_of(manifest, **{"model/wide": None})
    uncoded = replace(manifest, codec="")
    cases = [
        (flags, Cause.LAYOUT, "'model/mask' is no tensor of the model, or another one"),
        (other, Cause.LAYOUT, "'model/other' is no tensor of the model"),
        (short, Cause.CODEC, f"a payload of {size - 1} bytes came, expected {size}"),
        (missing, Cause.CODEC, "no payload, or one that cannot hold anything"),
        (wide, Cause.CODEC, "cannot hold ..model/wide"),
        (uncoded, Cause.LAYOUT, "tensor 2 is 'model/mean', expected 'model/a'"),
    ]
    return [(replace(update, manifest=m, data=bytes(m.total_bytes)), c, r) for m, c, r in cases]


@pytest.mark.parametrize("name", ["ternary", "vsa"])
def test_what_cannot_be_right_is_rejected_with_the_reason(tmp_path: Path, name: str) -> None:
    a_round = CodedRound(tmp_path, job_with(FEDERATED[name]))
    for wrong, cause, reason in wrong_updates(update_of(a_round.spec, 0)):
        with pytest.raises(UpdateRejectedError, match=reason) as raised:
            a_round.enter(0, wrong)
        assert raised.value.cause is cause
        assert files(tmp_path) == []
        assert a_round.spool.used_bytes == 0


def test_a_coded_update_larger_than_the_model_is_refused_before_it_comes(
    a_round: CodedRound,
) -> None:
    manifest = replace(update_of(TERNARY, 0).manifest, total_bytes=MODEL.total_bytes + 1)
    with (
        closing(a_round.decoding()) as decoding,
        pytest.raises(UpdateRejectedError, match=f"for a model of {MODEL.total_bytes}") as raised,
    ):
        decoding.check_size(manifest)
    assert raised.value.cause is Cause.SIZE


def spoiled(update: Update, at: int, content: bytes) -> Update:
    data = bytearray(update.data)
    data[at : at + len(content)] = content
    return replace(update, data=bytes(data))


LARGE = np.float32(3e38).tobytes()


@pytest.mark.parametrize(
    ("codec", "spoil", "cause", "reason"),
    [
        # The payload's order is Z, a, bias, ...; Z has 231 elements.
        ("ternary", (0, b"\xff"), Cause.CODEC, "a ternary payload holds the code 11"),
        ("ternary", (57, b"\xff"), Cause.CODEC, "a ternary payload holds the code 11"),
        ("int8", (-4, LARGE), Cause.NOT_FINITE, "values of 'model/Z' are not finite"),
        ("top_k", (48, b"\xff" * 8), Cause.CODEC, "does not name 12 of 231 places"),
        ("low_rank", (0, LARGE * 33), Cause.NOT_FINITE, "values of 'model/Z' are not finite"),
        ("bf16", (0, b"\x80\x7f"), Cause.NOT_FINITE, "values of 'model/Z' are not finite"),
        ("vsa-ternary", (0, b"\xff"), Cause.CODEC, "a ternary payload holds the code 11"),
    ],
)
def test_a_payload_that_no_client_codes_is_rejected(
    tmp_path: Path, codec: str, spoil: tuple[int, bytes], cause: Cause, reason: str
) -> None:
    """And nothing of it is left, though it was in the spool by then."""
    a_round = CodedRound(tmp_path, job_with(FEDERATED[codec]))
    update = update_of(a_round.spec, 0)
    head = 0 if codec in ("top_k", "low_rank", "bf16") else 4
    at = update.manifest.tensors[-1].offset + head + spoil[0]
    with pytest.raises(UpdateRejectedError, match=reason) as raised:
        a_round.enter(0, spoiled(update, at, spoil[1]))
    assert raised.value.cause is cause
    assert files(tmp_path) == []
    assert a_round.spool.entry(key(0)) is None
    entry = a_round.enter(0, update)
    assert a_round.fold([entry], [1]) == update.whole


def test_a_tensor_beside_the_payload_must_be_finite(a_round: CodedRound) -> None:
    update = spoiled(update_of(TERNARY, 0), MODEL.tensors[1].offset, b"\xff" * 8)
    with pytest.raises(UpdateRejectedError, match="values of 'model/wide' are not finite"):
        a_round.enter(0, update)


def test_what_is_sent_as_it_is_can_be_read_from_any_byte_on(a_round: CodedRound) -> None:
    """A window of the fold may begin and end in the middle of a tensor."""
    update = update_of(TERNARY, 0)
    entry = a_round.enter(0, update)
    with closing(a_round.decoding()) as decoding:
        source = decoding.source(0, entry)
        for spec in MODEL.stored():
            if spec.name in TRAINED:
                continue
            for start in range(spec.offset, spec.offset + spec.size_bytes):
                into = np.empty(min(7, spec.offset + spec.size_bytes - start), np.uint8)
                source.read(start, into)
                assert into.tobytes() == update.whole[start : start + into.size]


def test_without_what_decodes_it_a_coded_update_is_not_folded(a_round: CodedRound) -> None:
    entry = a_round.enter(0, update_of(TERNARY, 0))
    writer = a_round.store.writer(MODEL.total_bytes)
    with pytest.raises(InvalidInputError, match="is not laid out like the model"):
        fold_weighted_mean([entry], [1], MODEL, writer)


# ---- damage ----


@pytest.mark.parametrize(("codec", "at"), [("ternary", 9), ("low_rank", -1), ("top_k", -400)])
def test_a_file_that_the_disk_has_damaged_is_named(tmp_path: Path, codec: str, at: int) -> None:
    """In its header, in a tensor that is there as it is, and in the payload."""
    a_round = CodedRound(tmp_path, job_with(FEDERATED[codec]))
    entries = [a_round.enter(client, update_of(a_round.spec, client)) for client in (0, 1)]
    flip_bit(entries[1].path, at)
    with pytest.raises(IntegrityError, match=f"{entries[1].path.name} is damaged: .*checksum"):
        a_round.fold(entries, [1, 1])
    flip_bit(entries[1].path, at)
    entries[1].path.write_bytes(entries[1].path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"{entries[1].path.name} is damaged: it ends too"):
        a_round.fold(entries, [1, 1])


def test_bits_that_change_after_the_file_was_checked_are_found(a_round: CodedRound) -> None:
    entry = a_round.enter(0, update_of(TERNARY, 0))
    data = CheckedData(entry)
    whole = data.read(0, entry.data_bytes, "u1")
    assert data.read(5, 7, "u1").tolist() == whole[5:12].tolist()
    flip_bit(entry.path, -1)
    with pytest.raises(IntegrityError, match=f"{entry.path.name} is damaged: it has changed"):
        data.read(entry.data_bytes - 5, 5, "u1")
