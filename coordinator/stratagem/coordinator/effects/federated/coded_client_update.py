"""Commits an update that has arrived in the spool: as it was sent, or decoded.

One of the vsa codec, which has no windows, is decoded. It is small and is held in memory; what it
decodes to takes its place, so the fold treats it as an update that was not coded.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stratagem.common.compression.table import update_key
from stratagem.common.tensors.manifest import Purpose
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.spool_keys import SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry, SpoolWriter
from stratagem.coordinator.updates.update_checks import UpdateRejectedError
from stratagem.coordinator.updates.update_decoding import UpdateDecoding

Commit = Callable[[SpoolWriter], SpoolEntry]


def commit_update(
    arrived: SpoolWriter, decoding: UpdateDecoding, spool: Spool, key: SpoolKey, commit: Commit
) -> SpoolEntry:
    """Commit the update `key`, the only one of its `decoding`. Blocks.

    Raises UpdateRejectedError, after which nothing of it is left.
    """
    if not arrived.upload.manifest.codec or decoding.has_windows:
        return commit(arrived)
    data, expected = arrived.read_back(), decoding.expected
    try:
        layout = decoding.layout(arrived.upload.manifest)
        begin, size = layout.payload.offset, layout.payload.size_bytes
        with np.errstate(all="ignore"):  # what is not finite is rejected by the spool
            payload_key = update_key(decoding.job, key.round_num, key.client)
            decoded = layout.codec.decode(data[begin : begin + size], payload_key)
    except UpdateRejectedError:
        arrived.discard()
        raise
    except ValueError as error:
        arrived.discard()
        raise UpdateRejectedError(Cause.CODEC, str(error)) from error
    arrived.close()
    moves = dict(zip(layout.places, decoded, strict=True))
    manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
    source = f"decoded {arrived.upload.source}"
    writer = spool.open(key, manifest, source=source, before=decoding.known)
    try:
        for spec in expected.stored():
            if spec.name in moves:
                before = decoding.before(0, spec.offset, spec.size_bytes).view("<f4")
                with np.errstate(all="ignore"):
                    after = (before + moves[spec.name]).view(np.uint8)
            else:
                given = layout.given[spec.name]
                after = data[given.offset : given.offset + given.size_bytes]
            writer.write_at(spec.offset, after.data)
        return commit(writer)
    finally:
        writer.close()
