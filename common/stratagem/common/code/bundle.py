"""Pack the files of a folder as a code bundle: one zip in one canonical form, named by its digest.

Equal files give equal bytes: entries are sorted by name, uncompressed, dated 1980 and readable by
everybody. Readers of a bundle accept no other form, so an archive cannot hold anything besides its
files: no links, no names outside of the folder, no entry that expands while it is read. The archive
travels as a blob that holds one tensor of bytes; the digest of the bundle is that of the blob.
"""

import io
import stat
import struct
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from stratagem.common.base.errors import InvalidInputError, LimitError, StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest

# ---- Bundles ----

MAX_BYTES: Final = 10 * 2**20
"""The largest total size of the files of a bundle."""
MAX_FILES: Final = 2_000
MAX_NAME_BYTES: Final = 1_024
MAX_PART_BYTES: Final = 255
TENSOR: Final = "code.zip"
"""The name of the only tensor of a code bundle's blob, whose bytes are the zip archive."""

_NUM_LARGEST: Final = 5
_DATE: Final = (1980, 1, 1, 0, 0, 0)
_MODE: Final = stat.S_IFREG | 0o444
_LIST_ENTRY_BYTES: Final = 46
_ENTRY_BYTES: Final = 30 + _LIST_ENTRY_BYTES
"""The bytes that a zip archive needs per file in addition to the content and the name, which it
stores twice."""
_END: Final = struct.Struct("<4s4H2LH")
"""The end-of-archive record of a zip file."""
_END_SIGNATURE: Final = b"PK\5\6"
_FIELD: Final = "code"


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the canonical zip archive of files keyed by name, such as "package/module.py". Raises
    InvalidInputError for a name that is not allowed, LimitError for too much content."""
    check_size({name: len(content) for name, content in files.items()})
    check_names(files)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system, info.external_attr = 3, _MODE << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files of an untrusted archive, keyed by name. Raises InvalidInputError unless it
    is the canonical archive of its files, LimitError if it claims to hold too much, before anything
    of that size is allocated."""
    try:
        files = _files_of(archive)
        same = pack(files)
    except StratagemError:
        raise
    except (
        EOFError,
        IndexError,
        NotImplementedError,
        OSError,
        OverflowError,
        RuntimeError,
        ValueError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise InvalidInputError.at(_FIELD, f"is no bundle: {error}") from error
    if same != archive:
        raise InvalidInputError.at(_FIELD, "is no bundle: not in the form that `code:` makes")
    return files


def manifest_of(archive: bytes) -> Manifest:
    """Return the manifest, with digest, of the blob whose only tensor holds this code archive."""
    manifest = build_manifest([(TENSOR, "uint8", (len(archive),))], Purpose.DATA)
    return replace(manifest, digest=blob_digest(manifest, [archive]))


def digest_of(archive: bytes) -> Digest:
    """Return the digest that names a code bundle: that of the blob which holds this archive."""
    return Digest(manifest_of(archive).digest)


def check_size(sizes: Mapping[str, int]) -> None:
    """Raise LimitError, which names the largest files, if there are too many files or bytes."""
    total = sum(sizes.values())
    if len(sizes) <= MAX_FILES and total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:_NUM_LARGEST]
    named = ", ".join(f"{name[:200]} ({sizes[name]:,} bytes)" for name in largest)
    raise LimitError(
        f"{_FIELD}: {len(sizes):,} files with {total:,} bytes; at most {MAX_FILES:,} files with "
        f"{MAX_BYTES:,} bytes may travel with a job. The largest: {named}. Leave out what is no "
        "code with code.exclude or .gitignore; data belong into data.path"
    )


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidInputError for the first name that is not a relative path with "/" between its
    parts, or that some file system would confuse with another name."""
    places: dict[str, tuple[str, bool]] = {}
    for name in names:
        parts = _parts(name)
        for depth in range(1, len(parts) + 1):
            place = ("/".join(parts[:depth]), depth == len(parts))
            folded = unicodedata.normalize("NFC", place[0]).casefold()
            other = places.get(folded)
            if other is not None and (place != other or place[1]):
                raise _refused(name, f"stands beside {other[0]!r}, which some systems take for it")
            places[folded] = place


def _parts(name: str) -> list[str]:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise _refused(name, "is not UTF-8") from None
    parts = name.split("/")
    if num_bytes > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        raise _refused(name, "is too long")
    if any(part in ("", ".", "..") for part in parts):
        raise _refused(name, "is no path inside of a folder")
    if "\\" in name or not name.isprintable():
        raise _refused(name, "has a character that is not allowed")
    return parts


def _refused(name: str, reason: str) -> InvalidInputError:
    return InvalidInputError.at(_FIELD, f"{name[:200]!r} {reason}")


def _files_of(archive: bytes) -> dict[str, bytes]:
    if len(archive) > MAX_BYTES + MAX_FILES * (_ENTRY_BYTES + 2 * MAX_NAME_BYTES) + _END.size:
        raise LimitError(f"{_FIELD}: {len(archive):,} bytes are more than a bundle may have")
    # The record at the end is checked first, so that a list of a million entries is never made.
    signature, *_, num_entries, list_bytes, _, _ = _END.unpack(archive[-_END.size :])
    if signature != _END_SIGNATURE:
        raise InvalidInputError.at(_FIELD, "is no bundle: it does not end as one")
    if num_entries > MAX_FILES or list_bytes > MAX_FILES * (_LIST_ENTRY_BYTES + MAX_NAME_BYTES):
        raise LimitError(f"{_FIELD}: {num_entries:,} files; at most {MAX_FILES:,} are allowed")
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        entries = opened.infolist()
        for entry in entries:
            _check_entry(entry)
        check_names(entry.filename for entry in entries)
        check_size({entry.filename: entry.file_size for entry in entries})
        return {entry.filename: opened.read(entry) for entry in entries}


def _check_entry(entry: zipfile.ZipInfo) -> None:
    if entry.external_attr >> 16 != _MODE:
        raise _refused(entry.filename, "is no plain file: links and others are not allowed")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _refused(entry.filename, "is compressed, which is not allowed")
