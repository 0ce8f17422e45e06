"""The job files in examples/: all of them pass the check, and one of each kind runs on real
processes, at a size that a test can afford."""

import importlib
from pathlib import Path

import pytest
import torch

from docs.generate import pages
from stratagem.client.course.views import Event, Phase
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec, load_job
from stratagem.common.observe.findings import Level
from stratagem.common.privacy import accountant
from stratagem.common.strategy import Federated, PopulationBased
from stratagem.tools.check.check import check_job
from stratagem.tools.memory.play import Site
from stratagem.worker.data.sources import DataSources
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.cluster.jobs import train
from tests.house.pages import FENCE, RUNNABLE
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("the job files of the examples pass the check, and one of each kind runs"),
]

CPU = torch.device("cpu")
JOBS = [
    path
    for path in sorted((ROOT / "examples").glob("*.yaml"))
    # Each has a test of its own: the rows of the one are at sites, the other learns something.
    if path.stem not in ("own_codes", "attacked_federation")
]


def small(path: Path) -> JobSpec:
    """The same job, over in a second or two."""
    job = load_job(path)
    overrides = ["epochs=null", "steps=6"]
    if job.evaluation is not None:
        overrides.append("evaluation.every=3 steps")
    if job.only_evaluates:
        overrides = []
    elif isinstance(job.strategy, Federated):
        overrides = ["strategy.rounds=2"]
    elif isinstance(job.strategy, PopulationBased):
        overrides = ["strategy.generations=2", "steps_per_generation=2"]
    if job.data.streams is not None:
        overrides = ["steps=4", "evaluation.every=2 steps", "data.kwargs.num_lines=60"]
    if path.name.startswith("charlm"):
        overrides += ["data.kwargs.num_chars=8000", "model.kwargs.width=16"]
    return load_job(path, overrides)


RUN = ("charlm_allreduce", "digits", "digits_fedavg", "streaming_corpus")
"""One of each way to give rows; the strategies, turns and steps have tests of their own."""


@pytest.mark.parametrize(
    "name", ["rows", *(pytest.param(name, marks=pytest.mark.sweep) for name in RUN)]
)
def test_an_example_runs(client: Client, name: str) -> None:
    status = client.submit(small(ROOT / "examples" / f"{name}.yaml")).result().status
    assert status.phase is Phase.COMPLETED
    assert status.metrics


@pytest.mark.sweep
def test_the_example_of_a_verified_run_is_verified_apart_from_its_own_course(
    client: Client, tmp_path: Path
) -> None:
    run = client.submit(small(ROOT / "examples" / "digits_verified.yaml"))
    status = run.result().status
    assert status.verification == "2 chosen segments verified"
    assert status.engine == "shm", "that of two workers, not of the verifier"
    events = run.events()
    first = next(event for event in events if event.kind == "MembersFormed")
    again = [event for event in events if event.kind == "SegmentVerified"]
    members = {member["worker_id"] for member in first.payload["members"]}
    assert [event.payload["segment"] for event in again] == [1, 2]
    assert not members & {name for event in again for name in event.payload["workers"]}
    assert {stay.worker_id for stay in run.members()} == members
    assert "<h3>Verification</h3>" in run.report(tmp_path / "page.html").read_text()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "path", [path for path in JOBS if path.stem not in RUN], ids=lambda path: path.stem
)
def test_a_check_finds_no_fault_in_an_example(path: Path) -> None:
    """It builds the model, loads the rows and tries a step and an evaluation, in this process."""
    job, site = load_job(path), Site(EntryPoints(["examples.*:*"]), CPU, DataSources())
    if job.privacy is not None and not accountant.is_installed():
        pytest.skip("needs the extra privacy")
    found = check_job(job, site, lambda: "not asked for")
    assert [finding for finding in found if finding.level is Level.FAIL] == []
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.sweep
def test_privacy_is_drawn_against_what_it_costs(client: Client) -> None:
    if not accountant.is_installed():
        pytest.skip("needs the extra privacy")
    example = importlib.import_module("examples.privacy_curve")
    changes = ["strategy.num_clients=20", "strategy.rounds=2"]
    run = example.trained(client, 1.0, changes)
    assert run.epsilon == [accountant.epsilon_after(n, run.noise, 0.25, 1e-3) for n in (1, 2)]
    assert all(0 < accuracy < 1 for accuracy in run.accuracy)
    assert "noise 1" in example.picture_of([run]).svg_file


@pytest.mark.interop
def test_metrics_of_torchmetrics_are_those_of_the_plain_loop(client: Client) -> None:
    pytest.importorskip("torchmetrics", reason="needs the extra interop")
    example = importlib.import_module("examples.torchmetrics_digits")
    run = client.submit(JobSpec.parse(example.JOB))
    assert run.result().status.metrics.items() >= example.plain_loop(run.state_dict()).items()


SPACES = [
    (page.stem, RUNNABLE in found[2], found[3])
    for page in pages()
    for found in FENCE.finditer(page.read_text())
    if found[1] == "yaml" and "search_space:" in found[3]
]


@pytest.mark.sweep
@pytest.mark.parametrize(("page", "is_whole", "text"), SPACES, ids=[each[0] for each in SPACES])
def test_a_search_space_of_the_documentation_runs(
    client: Client, page: str, is_whole: bool, text: str, tmp_path: Path
) -> None:
    """Without a member that fails, and so without anything said of one."""
    path = tmp_path / "job.yaml"
    path.write_text(text if is_whole else f"{AROUND}{text}")
    run = client.submit(small(path))
    status = run.result().status
    assert status.reason.startswith("2 generations committed; member ")
    events = [each for each in run.watch() if isinstance(each, Event)]
    assert any(each.payload["copied"] for each in events if each.kind == "GenerationClosed")


AROUND = """
name: documented
model: {entrypoint: "tests.userland.models:tower"}
data: {entrypoint: "tests.userland.data:classes"}
loss: cross_entropy
optimizer: {name: sgd, lr: 0.1}
evaluation: {metrics: [accuracy], best: loss, mode: min}
steps_per_generation: 2
batch_size: 16
strategy:
  type: PopulationBased
  population_size: 6
  generations: 2
  exploit: {method: Truncation, fraction: 0.5}
  explore: {method: Resample}
"""


@pytest.mark.sweep
def test_corrected_clients_need_fewer_rounds(client: Client) -> None:
    example, fewer = importlib.import_module("examples.scaffold_curve"), ["strategy.rounds=5"]
    ways = ("FedAvg, 5 epochs", "SCAFFOLD, 5 epochs")
    runs = {way: example.trained(client, way, fewer) for way in ways}
    plain, corrected = (found[-1] for found in runs.values())
    assert corrected > plain + 0.05
    assert "SCAFFOLD" in example.picture_of(runs).svg_file


@pytest.mark.sweep
def test_fairness_is_drawn_from_what_clients_measure() -> None:
    example = importlib.import_module("examples.fairness_curve")
    with example.cluster_of_clients() as client:
        runs = [example.trained(client, way, ["strategy.rounds=2"]) for way in ("q 1", "fednova")]
    for run in runs:
        assert len(run.worst) == len(run.mean) == 2
        assert all(worst <= mean for worst, mean in zip(run.worst, run.mean, strict=True))
    assert "fednova" in example.picture_of(runs).svg_file


@pytest.mark.sweep
def test_the_worst_of_sites_that_differ_gains_most_by_a_layer_of_its_own() -> None:
    own_codes = importlib.import_module("examples.own_codes")
    with own_codes.sites() as client:
        fewer = ["strategy.rounds=8"]
        ways = own_codes.VARIANTS.items()
        runs = {name: own_codes.trained(client, change, fewer) for name, change in ways}
    worst = {name: rounds[-1]["test.accuracy.client_min"] for name, rounds in runs.items()}
    assert worst["personal layer"] > worst["Ditto"] > worst["FedAvg"] + 0.2
    assert "Ditto" in own_codes.picture_of(runs).svg_file


@pytest.mark.sweep
def test_the_mean_learns_what_false_clients_want_and_the_rule_of_the_example_does_not(
    client: Client,
) -> None:
    path = ROOT / "examples" / "attacked_federation.yaml"
    accuracies = []
    for changes in (["strategy.options={}"], []):
        outcome = train(client, load_job(path, ["strategy.rounds=10", *changes]))
        found = [event.payload["metrics"] for event in outcome.of("Evaluated")]
        accuracies.append([each["test.accuracy"] for each in found])
    assert max(accuracies[0]) < 0.5
    assert accuracies[1][-1] > 0.8
