"""`stratagem report` and `stratagem population`, on runs that real clusters have journaled."""

import json
from pathlib import Path

import pytest
from typer.testing import Result

from stratagem.client import Client
from stratagem.client.course.population import population
from stratagem.common.job import JobSpec
from tests.client.cli import command_line
from tests.client.course.recorded import golden, job_of
from tests.client.fake_coordinator import FakeCoordinator


@pytest.fixture(name="told")
def _told(fake: FakeCoordinator) -> FakeCoordinator:
    for name in ("population", "local"):
        events = golden(f"golden-{name}")
        fake.tell(name, JobSpec.parse(job_of(events)), events[:-2])
    return fake


def invoke(address: str, *arguments: object) -> Result:
    return command_line.invoke(*arguments, "--coordinator", address, env={"COLUMNS": "100"})


def test_a_population_is_shown_with_its_winner_lineage_and_schedule(
    told: FakeCoordinator, address: str, tmp_path: Path
) -> None:
    found = population(golden("golden-population"), job_of(golden("golden-population")))
    best = found.best
    assert best is not None
    done = invoke(address, "population", "population")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "generation" in lines[0]
    assert [line.split()[0] for line in lines if line[:6].strip().isdigit()] == ["1", "2", "3"]
    closed = [e.payload for e in golden("golden-population") if e.kind == "GenerationClosed"]
    told_of = {line.split()[0]: line for line in lines if line[:6].strip().isdigit()}
    for fact in closed:  # as in the line of `stratagem run` about a generation
        copies = [f"{each['member']} from {each['donor']}" for each in fact["copied"]]
        told_here = told_of[str(fact["generation"])]
        assert told_here.count(" from ") == len(copies)
        assert all(copy in told_here for copy in copies)
    assert any(fact["copied"] for fact in closed)
    assert f"best: {best}" in lines
    lineage = found.lineage(best.member, best.generation)
    assert f"lineage: {' > '.join(f'member {each}' for each in lineage)}" in lines
    steps = [line.split(":")[0] for line in lines if line.startswith("from step")]
    schedule = found.schedule(best.member, best.generation)
    assert steps == [f"from step {step}" for step, _ in schedule]
    as_json = json.loads(invoke(address, "population", "population", "--format", "json").stdout)
    assert as_json["best"]["score"] == best.score
    assert as_json["best"]["lineage"] == list(lineage)
    assert [each["from_step"] for each in as_json["best"]["schedule"]] == [s for s, _ in schedule]
    assert len(as_json["generations"]) == 3
    own = tmp_path / "winner.yaml"
    own.write_text("mine")
    refused = invoke(address, "population", "population", "--schedule", own)
    assert refused.exit_code == 1
    said = f"error: --schedule: {own} exists already; nothing was written"
    assert "".join(refused.stderr.split("\n")).replace(" ", "") == said.replace(" ", "")
    assert own.read_text() == "mine"
    refused = invoke(address, "population", "local")
    assert refused.exit_code == 1
    assert refused.stderr == "error: run local is not a population, or has not begun\n"


def test_a_report_is_written_as_one_file(
    told: FakeCoordinator, address: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    done = invoke(address, "report", "local", "-o", path)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{path}\n"
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert "<h1>local</h1>" in text
    assert text.count("<svg") >= 4


def test_runs_beside_each_other_are_written_as_one_file_and_are_values(
    told: FakeCoordinator, address: str, tmp_path: Path
) -> None:
    path = tmp_path / "both.html"
    done = invoke(address, "report", "local", "population", "-o", path)
    assert done.exit_code == 0, done.output
    text = path.read_text()
    with Client(address) as client:
        compared = client.compare(["local", client.get("population")])
    assert compared.run_ids == ("local", "population")
    assert "strategy.type" in {each.key for each in compared.differences}
    for each in compared.differences:
        assert f'<th scope="row">{each.key}</th>' in text
    for panel in compared.panels:
        assert panel.draw(760).svg in text
        assert panel.draw(760).table.to_html() in text
    for run_ids, reason in (
        (["local", "local"], "runs: 'local' is named twice"),
        ([f"run-{n}" for n in range(9)], "runs: names 9 runs, and takes 2 to 8"),
        (["local", "none"], "no run"),
    ):
        refused = invoke(address, "report", *run_ids, "-o", tmp_path / "other.html")
        assert refused.exit_code == 1
        assert reason in refused.stderr
    assert not (tmp_path / "other.html").exists()
