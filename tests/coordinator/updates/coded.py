"""Coded updates of a small model, their spool, and what they decode to, in plain numpy."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stratagem.common.base.ids import Digest
from stratagem.common.compression.table import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.coordinator.effects.train_client import commit_update
from stratagem.coordinator.store.blobs import BlobStore, DirectoryBlobs
from stratagem.coordinator.updates.fold import Rebasing, fold_weighted_mean
from stratagem.coordinator.updates.reading import UpdateDecoding
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.upload import SpoolEntry
from tests.coordinator.updates.updates import (
    FEDERATED,
    arrays,
    data_of,
    elements,
    key,
    manifest_of,
    plain_mean,
)
from tests.jobs import job

MODEL = manifest_of(
    [
        ("model/count", "int64", ()),
        ("model/wide", "float64", (3,)),
        ("model/a", "float32", (24, 41)),
        ("model/bias", "float32", (7,)),
        ("model/empty", "float32", (0, 3)),
        ("model/mean", "float32", (5,)),
        ("model/one", "float32", ()),
        ("model/Z", "float32", (33, 7)),
        ("model/mask", "bool", (3,)),
        ("model/half", "float16", (3,)),
    ],
    metadata={"averaged": '["model/mean", "model/wide", "model/half"]'},
)
"""Trained tensors of 0, 1, 7 and more elements, in another order than that of their names, and
others between them."""

TRAINED = ("model/a", "model/bias", "model/empty", "model/one", "model/Z")
STATE = 100
"""Seed of the state that clients begin from."""


def job_with(codec: dict[str, Any]) -> JobSpec:
    return job("mlp", compression=codec, strategy={**FEDERATED, "num_clients": 9})


TERNARY = job_with({"codec": "ternary"})


@dataclass(frozen=True)
class Update:
    """One client's update as it comes over the wire, and the whole model that it stands for."""

    manifest: Manifest
    data: bytes
    whole: bytes


def update_of(spec: JobSpec, client: int, state: int = STATE, model: Manifest = MODEL) -> Update:
    """The update of a client that began from the state of a seed."""
    trained = [each for each in model.stored() if each.name in TRAINED]
    codec, names = update_codec(spec, trained, CURRENT)
    before, ended = arrays(model, state), arrays(model, client)
    moves = [ended[name] - before[name] for name in names]
    payload_key = update_key(spec, 1, client)
    payload, _ = codec.encode(moves, codec.initial_state(), payload_key)
    decoded = dict(zip(names, codec.decode(payload, payload_key), strict=True))
    others = [each for each in model.stored() if each.name not in TRAINED]
    assert spec.compression is not None
    manifest = build_manifest(
        [
            *((each.name, each.dtype, each.shape) for each in others),
            (PAYLOAD, "uint8", (payload.size,)),
        ],
        Purpose.UPDATE,
        metadata={"client": str(client)},
        codec=spec.compression.codec,
    )
    whole = {
        each.name: before[each.name] + decoded[each.name] if each in trained else ended[each.name]
        for each in model.stored()
    }
    return Update(
        manifest,
        b"".join(ended[each.name].tobytes() for each in others) + payload.tobytes(),
        b"".join(raw.tobytes() for raw in whole.values()),
    )


class CodedRound:
    """A spool, and a store with the states of some seeds."""

    def __init__(
        self,
        root: Path,
        spec: JobSpec,
        seeds: Sequence[int] = (STATE,),
        spool: Spool | None = None,
        model: Manifest = MODEL,
    ) -> None:
        self.spec, self.model = spec, model
        self.spool = spool or Spool(root / "spool", quota_bytes=1 << 30)
        self.store = DirectoryBlobs(root / "blobs")
        self.states = {seed: stored(self.store, model, data_of(model, seed)) for seed in seeds}

    def decoding(self, bases: Sequence[int] = (STATE,)) -> UpdateDecoding:
        digests = [self.states[seed] for seed in bases]
        return UpdateDecoding(self.spec, CURRENT, self.store, self.model, digests)

    def enter(self, client: int, update: Update, base: int = STATE) -> SpoolEntry:
        """As it comes, a few bytes at a time."""
        writer = self.spool.open(key(client), update.manifest, source="worker-0/a")
        with closing(writer), closing(self.decoding([base])) as decoding:
            for start in range(writer.offset, len(update.data), 1000):
                writer.write_at(start, update.data[start : start + 1000])
            return commit_update(
                writer,
                decoding,
                self.spool,
                key(client),
                lambda each: each.commit(self.model, 1, check_coded=decoding.check),
            )

    def enter_as_before(self, client: int, update: Update) -> SpoolEntry:
        """As earlier versions have spooled coded updates: decoded, with an entry of five facts."""
        writer = self.spool.open(key(client), replace(self.model, metadata={}), source="decoded w")
        writer.write(update.whole)
        entry = writer.commit(self.model, 1)
        facts = json.loads(entry.path.with_name(f"{client}.json").read_text())
        assert sorted(facts) == [
            *("crc32c", "data_bytes", "data_start", "digest", "num_samples", "path")
        ]
        return entry

    def fold(
        self, entries: Sequence[SpoolEntry], weights: Sequence[float], bases: Sequence[int] = ()
    ) -> bytes:
        """The data of the mean; bases: seeds of the states of the clients, where they differ."""
        bases = bases or [STATE] * len(entries)
        late = {i: self.states[seed] for i, seed in enumerate(bases) if seed != STATE}
        writer = self.store.writer(len(header_bytes(self.model)) + self.model.total_bytes)
        digest, *_ = fold_weighted_mean(
            entries,
            weights,
            self.model,
            writer,
            decoding=self.decoding(bases),
            rebasing=Rebasing(self.store, self.states[STATE], late) if late else None,
        )
        return self.store.path(digest).read_bytes()[-self.model.total_bytes :]


def stored(store: BlobStore, model: Manifest, data: bytes) -> Digest:
    header = header_bytes(replace(model, purpose=Purpose.STATE))
    writer = store.writer(len(header) + len(data))
    writer.write(header)
    writer.write(data)
    return writer.commit()


def mean(model: Manifest, wholes: Sequence[bytes], weights: Sequence[float]) -> bytes:
    """What folding whole updates gives."""
    return plain_mean(model, [elements(model, whole) for whole in wholes], weights)
