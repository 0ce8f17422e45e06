"""What layers and models of their own are worth to sites that differ: three that have codes of
their own for the ten digits.

Trains examples/own_codes.yaml with a personal last layer, with Ditto and with neither, and draws
the accuracy at the worst site over the rounds.
    python examples/own_codes.py personal.svg
Runs on a cluster inside this machine; needs the extras local and examples.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from examples.digits import load
from stratagem.client import Client, Event, LocalCluster
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.svg import Picture
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
NUM_SITES: Final = 3
VARIANTS: Final = {
    "FedAvg": "strategy.options={}",
    "personal layer": 'strategy.options={personal: ["2.*"]}',
    "Ditto": "strategy.options={ditto: {lambda: 0.1}}",
}
Rounds = list[dict[str, float]]
"""The metrics of each round, in order."""


def coded(digits: Tensor, site: int) -> Tensor:
    """The digits as a site writes them down: its code of a digit is another one's of the next."""
    return (digits + site) % 10


@contextmanager
def sites() -> Iterator[Client]:
    """Three workers, each with every third image in a file of its own."""
    with TemporaryDirectory() as folder:
        arguments = {}
        for site in range(NUM_SITES):
            file, rows = Path(folder) / f"site-{site}.safetensors", {}
            for split, (x, y) in load().items():
                rows[f"{split}.x"] = x[site::NUM_SITES].contiguous()
                rows[f"{split}.y"] = coded(y[site::NUM_SITES], site)
            save_file(rows, file)
            arguments[f"worker-{site}"] = ["--local-data", f"digits={file}"]
        local = LocalCluster(
            workers=NUM_SITES,
            import_path=[ROOT],
            allow=["examples.*:*"],
            threads=1,
            worker_arguments=arguments,
        )
        with local as cluster, cluster.client() as client:
            yield client


def trained(client: Client, change: str, further: Sequence[str] = ()) -> Rounds:
    """Train one variant; return what was measured after each round."""
    run = client.submit(load_job(ROOT / "examples" / "own_codes.yaml", [change, *further]))
    run.result()
    events = (item for item in run.watch() if isinstance(item, Event) and item.kind == "Evaluated")
    by_round = {event.payload["segment"]: event.payload["metrics"] for event in events}
    return [by_round[number] for number in sorted(by_round)]


def picture_of(runs: dict[str, Rounds]) -> Picture:
    """Return the accuracy at the worst site over the rounds, a line for each variant."""
    lines = [
        Line(name, list(range(1, len(rounds) + 1)), [m["test.accuracy.client_min"] for m in rounds])
        for name, rounds in runs.items()
    ]
    return curve(lines, title="Accuracy at the worst site", unit="round", width=760)


def main() -> None:
    with sites() as client:
        runs = {name: trained(client, change) for name, change in VARIANTS.items()}
    for name, rounds in runs.items():
        last = rounds[-1]
        worst, mean = last["test.accuracy.client_min"], last["test.accuracy"]
        print(f"{name}: {worst:.1%} right at the worst site, {mean:.1%} in all")
    Path(sys.argv[1]).write_text(picture_of(runs).svg_file + "\n")


if __name__ == "__main__":
    main()
