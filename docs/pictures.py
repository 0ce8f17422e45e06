"""Makes the pictures of the documentation from real runs: `python docs/pictures.py`.

It trains the examples on a cluster inside this machine, kills a worker on the way, and writes what
the product draws of them to docs/images. No test asks whether they are current: times differ.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stratagem.client import Client, Event, LocalCluster, RunHandle
from stratagem.client.report.comparison import overlay_panels
from stratagem.client.report.panels import curve_panels
from stratagem.client.report.run_panels import strategy_panels
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
IMAGES: Final = ROOT / "docs" / "images"
WIDTH: Final = 760
KILLS: Final = (12, 24)
"""After these commits of the first run a worker is killed."""

RULES: Final = {
    "mean": "",
    "median": "{name: median}",
    "trimmed-mean": "{name: trimmed_mean, trim: 0.3}",
    "krum": "{name: krum, byzantine: 3}",
    "multi-krum": "{name: multi_krum, byzantine: 3}",
    "geometric-median": "{name: geometric_median}",
    "norm-bound": "{name: norm_bound, norm: 1.0}",
}
"""Robust rules, by the names of their runs."""


def main() -> None:
    """Run all examples and write their pictures."""
    local = LocalCluster(workers=4, import_path=[ROOT], threads=1)
    with local as cluster, cluster.client() as client:
        save(killed(cluster, client), ("loss", "members"))
        save(trained(client, "digits_gossip"), ("topology",))
        save(trained(client, "digits_pipeline"), ("stages",))
        clients = ("strategy.num_clients=12", "strategy.rounds=20")
        some = "strategy.client_selection={method: Random, fraction: 0.6}"
        save(trained(client, "digits_fedavg", *clients, some), ("clients", "rounds"))
        save(trained(client, "digits_population"), ("lineage", "hyperparameters"))
        save_compared(
            [attacked(client, *each) for each in RULES.items()], "test.accuracy", "robust"
        )


def trained(client: Client, example: str, *changes: str, run_id: str | None = None) -> RunHandle:
    """Return the run of an example, at its end."""
    run = client.submit(load_job(ROOT / "examples" / f"{example}.yaml", list(changes)), run_id)
    run.result()
    return run


def attacked(client: Client, name: str, rule: str) -> RunHandle:
    """Return the run of the federation in which three clients of ten lie, under a rule."""
    change = f"strategy.options.robust={rule}" if rule else "strategy.options={}"
    return trained(client, "attacked_federation", change, run_id=name)


def killed(cluster: LocalCluster, client: Client, run_id: str | None = None) -> RunHandle:
    """Return a run on three workers, of which two have been killed one after the other."""
    changes = ["strategy.num_replicas=3", "epochs=40", "optimizer.lr=0.02"]
    run = client.submit(load_job(ROOT / "examples" / "digits.yaml", changes), run_id)
    commits = 0
    for item in run.watch():
        if isinstance(item, Event) and item.kind == "SegmentCommitted":
            commits += 1
            if commits in KILLS:
                cluster.kill(run.status().worker_ids[-1])
    return run


def save(run: RunHandle, names: Sequence[str]) -> None:
    """Write the pictures of these names that a run has."""
    shown = run.shown()
    panels = {panel.name: panel for panel in [*curve_panels(shown), *strategy_panels(shown)]}
    for name in names:
        path = IMAGES / f"{name}.svg"
        path.write_text(panels[name].draw(WIDTH).svg_file + "\n")
        print(path.relative_to(ROOT), path.stat().st_size)


def save_compared(runs: Sequence[RunHandle], metric: str, name: str) -> None:
    """Write the curves that several runs have of a metric, in one picture."""
    panels = {panel.name: panel for panel in overlay_panels([run.shown() for run in runs])}
    path = IMAGES / f"{name}.svg"
    path.write_text(panels[metric].draw(WIDTH).svg_file + "\n")
    print(path.relative_to(ROOT), path.stat().st_size)


if __name__ == "__main__":
    main()
