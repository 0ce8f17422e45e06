"""Small, full and damaged disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory at a folder; the test is skipped where mounting is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the room there is; called again, what has been freed since, too."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


@contextmanager
def cut_off(folder: Path) -> Iterator[None]:
    """Each file below ends in its middle inside the block."""
    sound = {path: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
    assert sound
    for path, content in sound.items():
        path.write_bytes(content[: len(content) // 2])
    yield
    for path, content in sound.items():
        path.write_bytes(content)
