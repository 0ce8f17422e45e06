"""What idle processes tell Prometheus, recorded for the tests of the alert rules.

`python -m tests.deploy.recording` records it anew; a test says when that is needed.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from stratagem.client.local.cluster import LocalCluster
from tests.patience import PATIENCE_S

FOLDER: Final = Path(__file__).parent / "scrapes"
PROCESSES: Final = {"coordinator": "coordinator", "worker": "worker-0"}
_SAMPLE: Final = re.compile(r"^(stratagem_[a-z_]+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name, and labels in their order."""


def recorded(process: str) -> dict[Series, float]:
    """The samples of ours in a recorded scrape."""
    return samples((FOLDER / f"{process}.prom").read_text())


def samples(text: str) -> dict[Series, float]:
    return {
        (name, tuple(sorted(_LABEL.findall(labels)))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }


def fresh(wanted: Mapping[str, Collection[Series]] | None = None) -> dict[str, str]:
    """What coordinator and worker of a new cluster tell.

    wanted: by process, series that it is asked for until it has them: those of a heartbeat begin
    with the first one, which comes after the process is ready.
    """
    lacking = wanted or {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            workers=1,
            threads=1,
            data_dir=Path(folder),
            environment={
                f"STRATAGEM_{each}_METRICS_PORT": "0" for each in ("COORDINATOR", "WORKER")
            },
        ) as cluster,
    ):
        return {
            process: _scraped(cluster, name, lacking.get(process, ()))
            for process, name in PROCESSES.items()
        }


def _scraped(cluster: LocalCluster, name: str, wanted: Collection[Series]) -> str:
    ready = json.loads((cluster.folder / "ready" / name).read_text())
    url, deadline_s = f"http://{ready['metrics_address']}/metrics", time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        if not set(wanted) - set(samples(text)) or time.monotonic() > deadline_s:
            return text
        threading.Event().wait(0.05)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for process, text in fresh().items():
        lines = [line for line in text.splitlines() if line.startswith("stratagem_")]
        (FOLDER / f"{process}.prom").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
