"""What corrected steps buy: accuracy over the rounds, with SCAFFOLD and without, where each client
has two of the ten digits.

Trains examples/digits_scaffold.yaml both ways, with few local steps and with many.
    python examples/scaffold_curve.py scaffold.svg
Runs on a cluster inside this machine; needs the extras local and examples.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stratagem.client import Client, Event, LocalCluster
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.svg import Picture
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
WAYS: Final = {
    "FedAvg, 1 epoch": ("strategy.options.control=null", "strategy.options.local_epochs=1"),
    "FedAvg, 5 epochs": ("strategy.options.control=null",),
    "SCAFFOLD, 1 epoch": ("strategy.options.local_epochs=1",),
    "SCAFFOLD, 5 epochs": (),
}
"""Changes of the job, by the names of their lines."""


def trained(client: Client, way: str, changes: Sequence[str] = ()) -> list[float]:
    """Train one way; return the accuracy after each round."""
    path = ROOT / "examples" / "digits_scaffold.yaml"
    run = client.submit(load_job(path, [*WAYS[way], *changes]))
    run.result()
    events = (each for each in run.watch() if isinstance(each, Event) and each.kind == "Evaluated")
    found = {event.payload["segment"]: event.payload["metrics"] for event in events}
    return [found[number]["test.accuracy"] for number in sorted(found)]


def picture_of(runs: dict[str, list[float]]) -> Picture:
    """Return the accuracy over the rounds, a line for each way."""
    lines = [Line(way, list(range(1, len(found) + 1)), found) for way, found in runs.items()]
    return curve(lines, title="Accuracy, each client with two digits", unit="round", width=760)


def main() -> None:
    local = LocalCluster(workers=2, threads=1, import_path=[ROOT], allow=["examples.*:*"])
    with local as cluster, cluster.client() as client:
        runs = {way: trained(client, way) for way in WAYS}
    for way, found in runs.items():
        print(f"{way}: {found[4]:.1%} after 5 rounds, {found[-1]:.1%} after {len(found)}")
    Path(sys.argv[1]).write_text(picture_of(runs).svg_file + "\n")


if __name__ == "__main__":
    main()
