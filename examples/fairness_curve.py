"""What fairness buys: accuracy of the worst client over the rounds, for several ways to count.

Trains examples/digits_qfedavg.yaml with each; the clients measure the model on digits of their own.
    python examples/fairness_curve.py fairness.svg
Runs on a cluster inside this machine; needs the extras local and examples.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from safetensors.torch import save_file

from examples.uneven_digits import load_client
from stratagem.client import Client, Event, LocalCluster
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.svg import Picture
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
NUM_CLIENTS: Final = 5
WAYS: Final[Mapping[str, str]] = {
    "by rows": "{}",
    "fednova": "{normalize: fednova}",
    "q 0": "{q: 0}",
    "q 0.2": "{q: 0.2}",
    "q 1": "{q: 1}",
}
"""Options of the strategy, by the names of their lines."""


@dataclass(frozen=True)
class Trained:
    """The rounds of a run: accuracy of the worst client, and over all rows."""

    way: str
    worst: list[float]
    mean: list[float]


@contextmanager
def cluster_of_clients() -> Iterator[Client]:
    """Run a cluster in which each worker has the rows of one client."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.safetensors" for number in range(NUM_CLIENTS)]
        for number, path in enumerate(files):
            rows = load_client(number, NUM_CLIENTS).items()
            pairs = {
                f"{split}.{key}": t for split, xy in rows for key, t in zip("xy", xy, strict=True)
            }
            save_file({name: tensor.contiguous() for name, tensor in pairs.items()}, path)
        local = LocalCluster(
            workers=NUM_CLIENTS,
            threads=1,
            import_path=[ROOT],
            allow=["examples.*:*"],
            worker_arguments={
                f"worker-{number}": ["--local-data", f"digits={path}"]
                for number, path in enumerate(files)
            },
        )
        with local as cluster, cluster.client() as client:
            yield client


def trained(client: Client, way: str, changes: Sequence[str] = ()) -> Trained:
    """Train with one way to count."""
    own = ["data={worker_local: digits}", f"strategy.options={WAYS[way]}"]
    run = client.submit(load_job(ROOT / "examples" / "digits_qfedavg.yaml", [*own, *changes]))
    run.result()
    events = [each for each in run.watch() if isinstance(each, Event) and each.kind == "Evaluated"]
    found = [event.payload["metrics"] for event in events]
    worst = [metrics["test.accuracy.client_min"] for metrics in found]
    return Trained(way, worst, [metrics["test.accuracy"] for metrics in found])


def picture_of(runs: Sequence[Trained]) -> Picture:
    """Return the worst client's accuracy over the rounds, a line for each way to count."""
    lines = [Line(run.way, list(range(1, len(run.worst) + 1)), run.worst) for run in runs]
    return curve(lines, title="Accuracy of the worst client", unit="round", width=760)


def main() -> None:
    with cluster_of_clients() as client:
        runs = [trained(client, way) for way in WAYS]
    for run in runs:
        print(f"{run.way}: worst client {run.worst[-1]:.1%}, all rows {run.mean[-1]:.1%}")
    Path(sys.argv[1]).write_text(picture_of(runs).svg_file + "\n")


if __name__ == "__main__":
    main()
