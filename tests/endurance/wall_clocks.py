"""Wall clocks of processes that a test moves: all of the process sees it, gRPC and SQLite too."""

import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wall_clock.c")


@dataclass(slots=True)
class WallClocks:
    """One per name; a process that is started with its environment goes by it."""

    folder: Path
    _library: Path = field(init=False)

    def __post_init__(self) -> None:
        """Skips the test where nothing can be compiled."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("moving the clock of a process needs a C compiler")
        self._library = self.folder / "wall_clock.so"
        flags = ("-O2", "-shared", "-fPIC", "-o", str(self._library))
        subprocess.run([compiler, *flags, str(SOURCE), "-ldl", "-lpthread"], check=True)

    def environment_of(self, name: str) -> Mapping[str, str]:
        file = self._file(name)
        if not file.exists():
            file.write_bytes(bytes(8))
            file.chmod(0o644)
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET": str(file)}

    def move(self, seconds: float, *names: str) -> None:
        """Have clocks go `seconds` before the machine's from now on."""
        for name in names:
            with self._file(name).open("r+b", buffering=0) as file:
                file.write(struct.pack("q", round(seconds * 1e9)))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.clock"
