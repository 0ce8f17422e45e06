"""What a run on a local cluster was started with, kept beside its data for `resume --local`."""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stratagem.common.base.errors import NotFoundError
from stratagem.common.process.cpu_threads import ThreadChoice, bound_cores


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Settings with which a local cluster runs a job; they are saved so that `resume --local` knows
    them."""

    allow: tuple[str, ...]
    import_path: tuple[str, ...]
    tags: tuple[str, ...] = ()
    allow_code: str = "none"
    threads: int | None = None
    """Of each worker, however many there are when it goes on: the bits depend on it. None: begun
    with 0.2.0, which kept no number."""

    def save(self, data_dir: Path, run_id: str) -> None:
        path = _local_run_file(data_dir, run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, data_dir: Path, run_id: str) -> "LocalRun":
        path = _local_run_file(data_dir, run_id)
        try:
            kept = json.loads(path.read_text())
        except FileNotFoundError:
            raise NotFoundError(f"no local run {run_id} in {data_dir}") from None
        lists = {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
        return cls(**{**kept, **lists})

    def threads_of(self, num_workers: int) -> ThreadChoice:
        """Return the threads of each worker, with which the run goes on: 0.2.0 shared the cores
        that it was bound to among the workers, whatever its control groups paid for."""
        number = self.threads or max(1, bound_cores() // num_workers)
        return ThreadChoice(number, "as it began")

    def with_code_in(self, overrides: list[str]) -> "LocalRun":
        """The settings of a run whose job names further code of the user's in these overrides."""
        named = re.findall(r"[\w.]+:[A-Za-z_][\w.]*", " ".join(overrides))
        return replace(self, allow=tuple(dict.fromkeys((*self.allow, *named))))


def _local_run_file(data_dir: Path, run_id: str) -> Path:
    return data_dir / "runs" / f"{run_id}.json"
