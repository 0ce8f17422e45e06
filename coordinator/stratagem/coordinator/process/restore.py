"""Restore the data of a coordinator from a backup: `python -m
stratagem.coordinator.process.restore`.

Every blob is read, hashed and durable before the journal that names it is written, in one
transaction. An interrupted restore has therefore left no journal, and can be repeated.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    StratagemError,
)
from stratagem.common.base.ids import Digest, check_digest
from stratagem.common.process.process import temporary_folder, told
from stratagem.common.process.process_exit import MISTAKEN
from stratagem.common.tensors.files import from_file, read_header
from stratagem.coordinator.app.storage import Storage
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.store.blobs import BlobStore, DamagedBlobError
from stratagem.coordinator.store.files import PIECE_BYTES
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.leaves import LeafBlobs
from stratagem.coordinator.store.snapshot import TERMS_AHEAD, Known


class RestoreSettings(Settings):
    """The settings of a coordinator, and the folder of the backup."""

    model_config = SettingsConfigDict(cli_prog_name="stratagem restore")

    folder: CliPositionalArg[Path] = Field(description="the folder of the backup")


def main() -> None:
    """Restore a backup as the command line says, and print a summary."""
    try:
        settings = RestoreSettings()  # type: ignore[call-arg]
    except ValidationError as error:
        print(told("stratagem restore", error), file=sys.stderr)
        sys.exit(MISTAKEN)
    try:
        term, num_blobs = restore(settings)
    except (OSError, StratagemError) as error:
        sys.exit(f"error: {error}")
    print(
        f"restored: {num_blobs} blobs with their digests, and the journal, which goes on with term "
        f"{term + 1}"
    )


def restore(settings: RestoreSettings) -> tuple[int, int]:
    """Restore the backup to the places in the settings; return the term of the journal and the
    number of blobs. Raises InvalidInputError or ConflictError if the journal has events already."""
    folder, data_dir = settings.folder, settings.data_dir
    digests = _digests(folder / "backup.json")
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = Storage.open(settings)
    place = settings.journal or data_dir / "journal.sqlite"
    password = settings.journal_password_file
    journal = Journal.open(place, password_file=password)
    try:
        if journal.briefs(""):
            raise InvalidInputError.at(
                "journal", f"{place} has events already; restore into an empty journal"
            )
    finally:
        journal.close()
    with temporary_folder("restore", data_dir) as scratch:
        copied = scratch.path / "journal.sqlite"  # a later version may have to migrate it
        copied.write_bytes((folder / "journal.sqlite").read_bytes())
        backup = Known.of(copied)
        if backup.identity:
            storage.claim(backup.identity)
        if storage.objects is not None:
            # A sound local copy from before would hide that the object is damaged.
            storage = replace(storage, data_dir=scratch.path, cache_bytes=1)
        blobs = storage.blobs(backup.term + TERMS_AHEAD)
        for digest in digests:
            path = folder / "blobs" / digest[:2] / f"{digest}.safetensors"
            if _is_stored(blobs, digest) or _put(blobs, digest, path):
                continue
            if not isinstance(blobs, LeafBlobs):
                blobs = storage.leaves(backup.term + TERMS_AHEAD)
                if _is_stored(blobs, digest):
                    continue
            _put_leaves(blobs, digest, path)
        return Journal.restore(copied, place, password_file=password), len(digests)


def _digests(path: Path) -> list[Digest]:
    try:
        listed: Any = json.loads(path.read_text())["digests"]
        return [check_digest(digest) for digest in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError.at("folder", f"{path} is no list of a backup: {error}") from None


def _is_stored(blobs: BlobStore, digest: Digest) -> bool:
    """Return True if a blob is stored, and can be read without damage."""
    if not blobs.exists(digest):
        return False
    try:
        with blobs.open(digest) as file:
            while file.is_in_leaves and file.read(
                PIECE_BYTES
            ):  # each leaf is checked as it is read
                pass
    except DamagedBlobError as error:
        print(f"{error}; it is written again")
        return False
    return True


def _put(blobs: BlobStore, digest: Digest, path: Path) -> bool:
    """Store a blob of the backup; return False if its bytes have another digest."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing from the backup") from None
    with file:
        writer = blobs.writer(path.stat().st_size)
        while piece := file.read(PIECE_BYTES):
            writer.write(piece)
        if writer.digest != digest:
            writer.abort()
            return False
        writer.commit()
        return True


def _put_leaves(blobs: LeafBlobs, digest: Digest, path: Path) -> None:
    """Store a state of the backup in leaves, as in the store that was backed up."""
    damaged = IntegrityError(f"{path} is damaged: its bytes have another digest")
    try:
        manifest, start = read_header(path, blobs.limits)
    except (IntegrityError, InvalidInputError, LimitError):
        raise damaged from None
    writer = blobs.state_writer(manifest, ())
    try:
        content = from_file(path, start, manifest.total_bytes)
        for piece in content(0):
            writer.write(piece)
        if writer.digest() != digest:
            raise damaged
        writer.commit()
    finally:
        writer.abort()


if __name__ == "__main__":
    main()
