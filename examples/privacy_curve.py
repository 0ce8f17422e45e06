"""What privacy costs: accuracy on handwritten digits against epsilon, for several amounts of noise.

Trains examples/digits_private.yaml with each, or another job, and draws a line for each: one point
per round.
    python examples/privacy_curve.py privacy.svg
    python examples/privacy_curve.py rows.svg examples/digits_rows.yaml
Runs on a cluster inside this machine; needs the extras local, examples and privacy.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stratagem.client import Client, Event, LocalCluster, RunHandle
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.svg import Picture
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
PRIVATE: Final = ROOT / "examples" / "digits_private.yaml"
NOISE: Final = (1.0, 2.0, 4.0)
"""Standard deviations of the noise, over the clipping norm."""


@dataclass(frozen=True)
class Trained:
    """The rounds of a run: what was spent with each, and how good its model is."""

    noise: float
    epsilon: list[float]
    accuracy: list[float]


def trained(
    client: Client, noise: float, changes: Sequence[str] = (), job: Path = PRIVATE
) -> Trained:
    """Train with this much noise, without a limit of epsilon."""
    own = [f"privacy.noise_multiplier={noise}", "privacy.target={delta: 1.0e-3}"]
    run = client.submit(load_job(job, [*own, *changes]))
    run.result()
    spent, measured = by_round(run, "SegmentCommitted"), by_round(run, "Evaluated")
    rounds = sorted(spent.keys() & measured.keys())
    return Trained(
        noise,
        [spent[number]["privacy.epsilon"] for number in rounds],
        [measured[number]["test.accuracy"] for number in rounds],
    )


def by_round(run: RunHandle, kind: str) -> dict[int, dict[str, float]]:
    """Return the metrics of a run's events of one kind, by round."""
    events = (item for item in run.watch() if isinstance(item, Event) and item.kind == kind)
    return {event.payload["segment"]: event.payload["metrics"] for event in events}


def picture_of(runs: Sequence[Trained]) -> Picture:
    """Return accuracy over epsilon, a line for each amount of noise."""
    lines = [Line(f"noise {run.noise:g}", run.epsilon, run.accuracy) for run in runs]
    return curve(lines, title="Accuracy against epsilon", unit="epsilon", width=760)


def main() -> None:
    local = LocalCluster(workers=2, import_path=[ROOT], allow=["examples.*:*"], threads=1)
    with local as cluster, cluster.client() as client:
        job = Path(sys.argv[2]) if len(sys.argv) > 2 else PRIVATE
        runs = [trained(client, noise, job=job) for noise in NOISE]
    for run in runs:
        print(f"noise {run.noise:g}: epsilon {run.epsilon[-1]:.2f}, {run.accuracy[-1]:.1%} right")
    Path(sys.argv[1]).write_text(picture_of(runs).svg_file + "\n")


if __name__ == "__main__":
    main()
