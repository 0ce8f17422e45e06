"""Code bundles: one form for the same files, and nothing but that form is opened."""

import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.code.bundle import MAX_BYTES, MAX_FILES, digest_of, manifest_of, pack, unpack
from stratagem.common.code.signatures import is_signed, make_keys, read_public_keys, sign

pytestmark = pytest.mark.core

FILES = {"model.py": b"x = 1\n", "package/__init__.py": b"", "package/größe.py": b"y = 2\n"}


def archive_of(files: Mapping[str, bytes], **entry: int) -> bytes:
    """An archive as `pack` makes it, of any names; `entry` changes what it says of each."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", entry.get("compress_type", zipfile.ZIP_STORED)) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.filename = name  # whole, also where it has a zero, at which ZipInfo cuts it
            info.external_attr = (stat.S_IFREG | 0o444) << 16
            for key, value in entry.items():
                setattr(info, key, value)
            archive.writestr(info, content)
    return buffer.getvalue()


def test_a_bundle_has_the_bytes_of_its_files_and_of_nothing_else() -> None:
    archive = pack(FILES)
    assert pack(dict(reversed(FILES.items()))) == archive
    assert unpack(archive) == FILES
    assert manifest_of(archive).digest == digest_of(archive)
    # Workers of another Python read bundles of this one.
    assert digest_of(archive) == "162de35b291b9cd039b0d48f725d538ccb44d66aaf241437da6647bfd29f0a4a"


parts = st.one_of(
    st.text(max_size=6), st.sampled_from([".", "..", "", "a", "A", "ſ", "s", "CON", "é", "e\u0301"])
)
names = st.lists(parts, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(names, st.binary(max_size=8), min_size=1, max_size=4))
@example({"0\0": b""})
def test_names_stay_in_the_folder_and_apart(files: dict[str, bytes]) -> None:
    """What is accepted makes as many files as there are names, in any folder of any system."""
    try:
        archive = archive_of(files)
    except (UnicodeEncodeError, ValueError):
        assume(False)
    try:
        opened = unpack(archive)
    except InvalidInputError:
        return
    assert opened == files
    for name in opened:
        path = Path("/folder", name)
        assert not Path(name).is_absolute()
        assert ".." not in path.parts
        assert path.as_posix() == f"/folder/{name}"
    assert len({name.casefold() for name in opened}) == len(files)


@given(st.data())
def test_bytes_that_have_changed_are_refused(data: st.DataObject) -> None:
    archive = bytearray(pack(FILES))
    for _ in range(data.draw(st.integers(1, 3))):
        archive[data.draw(st.integers(0, len(archive) - 1))] ^= data.draw(st.integers(1, 255))
    archive = archive[: data.draw(st.integers(0, len(archive)))]
    assume(archive != pack(FILES))  # two changes of a byte may be none
    with pytest.raises((InvalidInputError, LimitError)):
        unpack(bytes(archive))


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        *(
            (archive_of({name: b""}), "no path inside")
            for name in ("/etc/passwd", "../model.py", "a/../../model.py", "a//b.py", "folder/")
        ),
        (archive_of({"a\\..\\b.py": b""}), "character"),
        (archive_of({"a\nb.py": b""}), "character"),
        (archive_of({"a" * 300: b""}), "too long"),
        (archive_of({"Model.py": b"", "model.py": b""}), "some systems"),
        (archive_of({"a": b"", "a/b.py": b""}), "some systems"),
        (archive_of({"A/x.py": b"", "a/y.py": b""}), "some systems"),
        (archive_of({"link": b"/etc/passwd"}, external_attr=(stat.S_IFLNK | 0o777) << 16), "links"),
        (archive_of({"a.py": b""}, external_attr=(stat.S_IFREG | 0o4755) << 16), "plain file"),
        (archive_of({"bomb": bytes(1000)}, compress_type=zipfile.ZIP_DEFLATED), "compressed"),
        (archive_of({"b.py": b"", "a.py": b""}), "form"),
        (archive_of({"a.py\0.txt": b""}), "form"),
        (pack(FILES) + b"more", "no bundle"),
        (b"more" + pack(FILES), "form"),
        (b"", "no bundle"),
        (b"import os", "no bundle"),
    ],
)
def test_hostile_archives_are_refused(archive: bytes, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        unpack(archive)


def test_an_archive_that_says_to_hold_much_is_refused_before_it_is_read() -> None:
    content = bytes(MAX_BYTES // 2)
    with pytest.raises(LimitError, match=r"largest: 0 \(5,242,880 bytes\), 1 \(5,242,880 bytes\)"):
        unpack(archive_of({"0": content, "1": content, "2": b"x"}))
    with pytest.raises(LimitError, match="at most 2,000"):
        unpack(archive_of({str(number): b"" for number in range(MAX_FILES + 1)}))
    with pytest.raises(LimitError, match="more than a bundle"):
        unpack(bytes(2 * MAX_BYTES))


def test_a_signature_is_of_one_digest_by_one_key(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for key in (first, second):
        make_keys(key, key.with_suffix(".pub"))
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    both = tmp_path / "both"
    both.write_text("\n".join(key.with_suffix(".pub").read_text() for key in (first, second)))
    digest, other = digest_of(pack(FILES)), digest_of(pack({"a": b""}))
    signature = sign(digest, second)
    assert is_signed(digest, signature, read_public_keys(both))
    assert not is_signed(other, signature, read_public_keys(both))
    assert not is_signed(digest, signature, read_public_keys(first.with_suffix(".pub")))
    with pytest.raises(InvalidInputError, match="is there already"):
        make_keys(first, tmp_path / "third.pub")
    with pytest.raises(InvalidInputError, match="holds no key"):
        read_public_keys(first)
    first.chmod(0o644)
    with pytest.raises(InvalidInputError, match="0644"):
        sign(digest, first)
