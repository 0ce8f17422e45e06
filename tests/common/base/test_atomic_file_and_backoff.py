"""Files that appear whole, and pauses between attempts."""

import os
from pathlib import Path

import pytest

from stratagem.common.base.files import whole_file
from stratagem.common.base.retry import Backoff

pytestmark = pytest.mark.core


def write(path: Path, content: bytes, **options: object) -> None:
    with whole_file(path, **options) as file:  # type: ignore[arg-type]
        file.write(content)


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    for content in (b"", b"1", b"seven!!"):
        write(path, content, durable=durable)
        assert path.read_bytes() == content

    def half() -> None:
        with whole_file(path, durable=durable) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert path.read_bytes() == b"seven!!"
    assert os.listdir(tmp_path) == ["file"]


def test_it_never_has_more_rights_than_asked_for_and_an_error_names_it(tmp_path: Path) -> None:
    left = tmp_path / f".key.{os.getpid()}.part"  # of a process of this number that was killed
    left.write_bytes(b"for everybody")
    left.chmod(0o666)
    with whole_file(tmp_path / "key", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert (tmp_path / "key").read_bytes() == b""
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "nowhere" / "file", b"")
    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_pauses_double_up_to_a_limit_and_begin_again() -> None:
    backoff = Backoff(0.1, 0.5)
    for limit_s in (0.1, 0.2, 0.4, 0.5, 0.5):
        assert limit_s / 2 <= backoff.next_s() <= limit_s
    backoff.reset()
    assert backoff.next_s() <= 0.1
