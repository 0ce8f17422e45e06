"""What verification costs: the training beside a verifier, and `verify` against the training.

    python benchmarks/verification.py --rounds 5 --steps 4000

A cluster of two workers on this machine, one thread each; one of them trains an MLP locally, the
other is spare. Per round, the same job runs without verification, with `sample: 0.05` and with
`sample: 1.0`, in turns; then the run without verification is verified on the same cluster. Printed
are medians of the seconds from the first to the last commit (of a verification, from its start to
its end), and medians of the ratios per round to the run without verification.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stratagem.client.course.views import Event
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.jobs import document, user_data, user_model

ROOT = Path(__file__).parents[1]
SAMPLES = {"none": 0.0, "0.05": 0.05, "1.0": 1.0}


def job(num_steps: int, sample: float) -> dict[str, Any]:
    verification = {"sample": sample} if sample else None
    return document(
        user_model("mlp"),
        name="verification",
        data=user_data("classes", num_rows=4096, num_test_rows=0),
        steps=num_steps,
        checkpoint={"every": f"{num_steps // 40} steps"},
        batch_size=64,
        strategy={"type": "Local"},
        evaluation=None,
        retention=2,
        verification=verification,
    )


def trained_s(run: RunHandle) -> float:
    """Return the seconds from the first to the last commit of a run."""
    times = [
        item.time_s
        for item in run.watch()
        if isinstance(item, Event) and item.kind == "SegmentCommitted" and not item.payload["party"]
    ]
    return times[-1] - times[0]


def one_round(client: Client, num_steps: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    runs: dict[str, RunHandle] = {}
    for name, sample in SAMPLES.items():
        runs[name] = client.submit(job(num_steps, sample))
        seconds[name] = trained_s(runs[name])
        runs[name].result()
    begun_s = time.monotonic()
    assert client.verify(runs["none"].run_id).difference is None
    seconds["verify"] = time.monotonic() - begun_s
    for run in runs.values():
        run.delete()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            workers=2,
            threads=1,
            data_dir=Path(folder),
            import_path=[ROOT],
            allow=["tests.userland.*:*"],
        ) as cluster,
        cluster.client() as client,
    ):
        one_round(client, options.steps)  # to start all processes' libraries
        rounds = [one_round(client, options.steps) for _ in range(options.rounds)]
    for name in rounds[0]:
        seconds = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["none"] for each in rounds)
        print(f"{name:8} {seconds:8.3f} s   {ratio:.3f} of training without verification")


if __name__ == "__main__":
    main()
