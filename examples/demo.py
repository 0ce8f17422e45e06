"""Trains the handwritten digits under two strategies on a cluster inside this machine.

One coordinator and two workers run as processes of their own and talk gRPC over loopback. Each job
is run as its file says and once more under Local, for comparison. Everything is kept below
./demo-output. `make demo` runs this.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from stratagem.client import Client, Event, LocalCluster, RunStatus
from stratagem.client.cli.shared import Format, RunDisplay, show
from stratagem.client.terminal.followed import FollowedRun

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
WANTED_ACCURACY = {"digits.yaml": 0.95, "digits_fedavg.yaml": 0.90}


@dataclass(frozen=True)
class Outcome:
    """A finished run, and how many training rows it went through."""

    status: RunStatus
    num_rows: int

    @property
    def accuracy(self) -> float:
        return self.status.metrics["test.accuracy"]


def main() -> int:
    console = Console(highlight=False)
    cluster = LocalCluster(
        workers=2, data_dir=OUTPUT, allow=("examples.digits:*",), import_path=(ROOT,)
    )
    has_failed = False
    with cluster, cluster.client() as client:
        console.print(f"cluster: coordinator at {cluster.address}, {cluster.workers} workers")
        for file_name, wanted in WANTED_ACCURACY.items():
            job = yaml.safe_load((ROOT / "examples" / file_name).read_text())
            outcome = train(console, client, job)
            local = train(console, client, as_local(job))
            report(console, outcome, local)
            if outcome.accuracy < wanted:
                console.print(f"  [red]accuracy is below {wanted}[/red]")
                has_failed = True
    return int(has_failed)


def train(console: Console, client: Client, job: dict[str, Any]) -> Outcome:
    """Run a job to its end behind one live line."""
    run = client.submit(job)
    show(console, Format.TEXT, run.watch(), RunDisplay(FollowedRun.of(run.status())))
    events = (item for item in run.watch() if isinstance(item, Event))
    built = next(event for event in events if event.kind == "ModelBuilt")
    rows_per_epoch = built.payload["num_rows"]["train"]
    return Outcome(run.result().status, rows_per_epoch * num_epochs(job))


def num_epochs(job: dict[str, Any]) -> int:
    """Passes over the data; in a round of all clients each row is seen once per local epoch."""
    if "epochs" in job:
        return int(job["epochs"])
    strategy = job["strategy"]
    return int(strategy["rounds"] * strategy["options"]["local_epochs"])


def as_local(job: dict[str, Any]) -> dict[str, Any]:
    """The same job on one worker that sees all data; a round becomes an epoch."""
    local = {key: value for key, value in job.items() if key != "partition"}
    every = job["evaluation"]["every"].replace("round", "epoch")
    return {
        **local,
        "name": f"{job['name']}-as-local",
        "epochs": num_epochs(job),
        "evaluation": {**job["evaluation"], "every": every},
        "strategy": {"type": "Local"},
    }


def report(console: Console, outcome: Outcome, local: Outcome) -> None:
    status, commit = outcome.status, outcome.status.commit()
    is_federated = status.strategy.startswith("Federated")
    amount = f"{status.segment} rounds" if is_federated else f"{status.step} steps"
    seconds = status.seconds or 0.0
    rate = outcome.num_rows / seconds if seconds else 0.0
    console.print(f"[bold]{status.strategy}[/bold]: {amount} in {seconds:.1f} s")
    console.print(f"  test accuracy     {outcome.accuracy:.4f}")
    console.print(f"  as a Local run    {local.accuracy:.4f}")
    console.print(f"  samples per s     {rate:,.0f}")
    console.print(f"  checkpoint        {commit.path if commit else 'none'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
