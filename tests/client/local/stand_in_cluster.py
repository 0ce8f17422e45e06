"""A LocalCluster whose processes are played by stand-ins, which start at once."""

import sys
from pathlib import Path

from stratagem.client.local.cluster import LocalCluster

STAND_IN = Path(__file__).with_name("stand_in.py")
PROGRAMS = {part: [sys.executable, str(STAND_IN)] for part in ("coordinator", "worker")}


def make_cluster(folder: Path, **options: object) -> LocalCluster:
    return LocalCluster(data_dir=folder, programs=PROGRAMS, **options)  # type: ignore[arg-type]
