"""Virtual environments for what we race against, made once and kept apart from the project's."""

import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOWER = "1.42.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to race against: the interpreter that has it, or why there is none."""

    name: str
    python: Path | None
    reason: str = ""


def ray(folder: Path) -> Peer:
    """Ray Tune at the version that `make ray` installs; torch is this environment's."""
    lock = (ROOT / "requirements-ray.lock").read_text()
    found = re.search(r"^ray==(\S+)", lock, re.MULTILINE)
    assert found is not None
    return _peer(folder / "ray", f"Ray Tune {found[1]}", f"ray[tune]=={found[1]}", has_torch=True)


def flower(folder: Path) -> Peer:
    return _peer(folder / "flower", f"Flower {FLOWER}", f"flwr=={FLOWER}", has_torch=False)


def _peer(folder: Path, name: str, requirement: str, *, has_torch: bool) -> Peer:
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if installed.exists() and installed.read_text() == requirement:
        return Peer(name, python)
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        if has_torch:
            packages = Path(_run(str(python), "-c", _PACKAGES).strip())
            (packages / "project.pth").write_text(sysconfig.get_path("purelib"))
        _run(str(python), "-m", "pip", "install", "--quiet", requirement)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [str(error)]
        return Peer(name, None, f"cannot be installed: {last[0]}")
    installed.write_text(requirement)
    return Peer(name, python)


_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
