"""A worker with a site file takes what it allows from that file alone."""

from pathlib import Path

import pytest

from stratagem.common.process.process_exit import MISTAKEN
from stratagem.worker.process import worker_main
from tests.worker.site.jobs import ANY, site_of

pytestmark = pytest.mark.core


def started(capfd: pytest.CaptureFixture[str], *flags: str, status: int = MISTAKEN) -> str:
    """What a worker says that does not start."""
    assert worker_main.main(["--coordinator", "127.0.0.1:1", "--name", "w", *flags]) == status
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--allow-code", "any"], "--allow-code"),
        (["--allow-code", "signed:keys.pem"], "--allow-code"),
        (["--allow", "consortium.*:*"], "--allow"),
        (["--local-data", "xray=x.safetensors"], "--local-data"),
    ],
)
def test_what_the_file_says_is_said_nowhere_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], name: str
) -> None:
    site_of(tmp_path, ANY)
    file = tmp_path / "site.toml"
    said = started(capfd, "--site", str(file), *flags)
    assert f"{name} is said by the file of --site, {file}; leave {name} out" in said


def test_a_wrong_file_is_said_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site_of(tmp_path, ANY)
    file = tmp_path / "site.toml"
    file.write_text(f"{file.read_text()}max_rounds = 0\n")
    said = started(capfd, "--site", str(file), status=1)
    assert f"stratagem worker: --site {file}: accept[0].max_rounds: 0 is not allowed" in said
