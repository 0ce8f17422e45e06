"""Backups: one moment of the journal, and a hold on all blobs that its facts need.

Nothing is collected while the moment is fixed, so every blob that the copy of the journal names is
in the list that the hold keeps. The list is a blob of its own, durable before the fact that names
it. What a backup copies is then there for a day, though its runs may be deleted meanwhile. Lists
are in no backup: a coordinator that goes on from its journal holds nothing for those of another.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import WrongStateError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Purpose, build_manifest
from stratagem.coordinator.core.commands import HoldBlobs
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.store.blobs.blob_store import BlobStore, MissingBlobError
from stratagem.coordinator.store.journal.snapshot import Snapshot

HOLD_S: Final = 86_400.0
_DIGEST_BYTES: Final = 32

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a backup copies."""

    journal: Path
    """A SQLite file that is deleted when the caller has it."""
    term: int
    digests: Sequence[Digest]
    """The blobs that its facts need."""


class Backups:
    """The backups of a coordinator, of which one is begun at a time."""

    def __init__(
        self, loop: Loop, blobs: BlobStore, folder: Path, collect: Callable[[], None]
    ) -> None:
        """folder: for journals that are being sent; collect: asks for a collection of blobs."""
        self._loop, self._blobs, self._folder, self._collect = loop, blobs, folder, collect
        self._held: dict[Digest, frozenset[Digest]] = {}
        self._is_busy = False
        self.is_fixing = False
        """True while no blob may be collected."""

    async def held(self) -> Sequence[frozenset[Digest]]:
        """Return the blobs that are kept for backups of this coordinator now, by backup."""
        now_s = self._loop.clock.now()
        present = [each for each, until_s in self._loop.state.holds.items() if until_s > now_s]
        for listed in present:
            if listed not in self._held:
                self._held[listed] = await asyncio.to_thread(_read, self._blobs, listed)
        self._held = {listed: self._held[listed] for listed in present}
        return tuple(self._held.values())

    @asynccontextmanager
    async def taken(self, by: str) -> AsyncIterator[Taken]:
        """Fix the present moment, and hold its blobs. Raises WrongStateError while another backup
        is sent."""
        if self._is_busy:
            raise WrongStateError("another backup is being taken; try again when it is done")
        self._is_busy = True
        try:
            snapshot, digests = await self._fixed(by)
            path = self._folder / f"{secrets.token_hex(8)}.sqlite"
            try:
                await asyncio.to_thread(self._write, snapshot, path)
                yield Taken(path, snapshot.term, digests)
            finally:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        finally:
            self._is_busy = False

    async def _fixed(self, by: str) -> tuple[Snapshot, Sequence[Digest]]:
        self.is_fixing = True
        try:
            snapshot, state = await self._loop.snapshot()
            try:
                digests = await asyncio.to_thread(
                    lambda: sorted(live_blobs(state) - state.holds.keys())
                )
                listed = await asyncio.to_thread(_write, self._blobs, digests)
                until_s = self._loop.clock.now() + HOLD_S
                await self._loop.submit(HoldBlobs(listed, until_s, by))
            except BaseException:
                await asyncio.to_thread(snapshot.close)
                raise
        finally:
            self.is_fixing = False
            self._collect()
        return snapshot, digests

    def _write(self, snapshot: Snapshot, path: Path) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for left in self._folder.iterdir():  # of a coordinator that was killed
                left.unlink()
            snapshot.write(path)
        finally:
            snapshot.close()


def _write(blobs: BlobStore, digests: Sequence[Digest]) -> Digest:
    """Write the list of these blobs, as a blob."""
    shape = (len(digests), _DIGEST_BYTES)
    header = header_bytes(build_manifest([("digests", "uint8", shape)], Purpose.STATE))
    content = header + b"".join(map(bytes.fromhex, digests))
    writer = blobs.writer(len(content))
    writer.write(content)
    return writer.commit()


def _read(blobs: BlobStore, listed: Digest) -> frozenset[Digest]:
    """Return the blobs that a list names: none where the journal was restored without it."""
    try:
        with blobs.open(listed) as file:
            _, start = header_of(file, listed)
            file.seek(start)
            content = file.read()
    except MissingBlobError:
        _log.info("a hold is of a backup of another coordinator", listed=listed)
        return frozenset()
    places = range(0, len(content), _DIGEST_BYTES)
    return frozenset(Digest(content[at : at + _DIGEST_BYTES].hex()) for at in places)
