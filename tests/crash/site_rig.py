"""Two sites with data of their own, whose workers a test kills."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.common.identity.audit import CheckedAudit, check_lines
from tests.crash.rig import Rig, cluster_with_failpoints

NUM_SITES = 2


@dataclass
class SiteRig:
    rig: Rig
    folder: Path

    def checked(self, number: int) -> CheckedAudit:
        with self._audit(number).open("rb") as lines:
            return check_lines(lines)

    def rounds(self, number: int) -> list[dict[str, Any]]:
        """The lines of the audit of a site about its updates."""
        lines = map(json.loads, self._audit(number).read_text().splitlines())
        return [line for line in lines if line["kind"] == "round"]

    def kept(self, run_id: str, number: int) -> Path:
        """The folder of what the client of a site keeps of a run."""
        name = f"worker-{number}"
        folder = self.rig.cluster.folder / name / f"clients-{name}"
        return folder / run_id / f"client-{number}"

    def _audit(self, number: int) -> Path:
        return self.folder / f"site-{number}" / "audit.jsonl"


@contextmanager
def sites_in(folder: Path, file_of: Callable[[int], str], **changes: Any) -> Iterator[SiteRig]:
    """file_of: the section `data.ward` of a site, and what it asks of jobs."""
    arguments = {}
    for number in range(NUM_SITES):
        file = folder / f"site-{number}" / "site.toml"
        file.parent.mkdir()
        accept = '[[accept]]\ndata = ["ward"]\nentrypoints = ["tests.userland.*:*"]\n'
        data, _, rules = file_of(number).partition("---\n")
        file.write_text(f'site = "site-{number}"\n[data.ward]\n{data}{accept}{rules}')
        arguments[f"worker-{number}"] = ["--site", str(file)]
    cluster = cluster_with_failpoints(
        workers=NUM_SITES, allow=[], allow_code="none", worker_arguments=arguments, **changes
    )
    with cluster, cluster.client() as client:
        yield SiteRig(Rig(cluster, client), folder)
