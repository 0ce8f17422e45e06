"""The page of a run, for each strategy, from runs that real clusters have journaled."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stratagem.client.course.step_history import History
from stratagem.client.course.views import Event, Phase, UserError, Worker
from stratagem.client.pictures.axes import duration, short
from stratagem.client.report.notebook import (
    ListedEvents,
    ListedRuns,
    ListedWorkers,
    header_html,
    run_html,
)
from stratagem.client.report.pages import page
from stratagem.client.report.panels import curve_panels
from stratagem.client.report.run import ReportedRun, mean_line, with_history
from stratagem.client.report.run import recorded as recorded_of
from stratagem.client.report.run_panels import strategy_panels, time_line_panel
from stratagem.common.history import Columns
from stratagem.common.history.recording import StageAction, StageReport, party_of_stage
from tests.client.course.recorded import golden
from tests.client.report.reported import recorded, reported
from tests.client.report.tags import Tags
from tests.odd_texts import HARMFUL, ODD_TEXTS

MADE_AT = "2026-11-23 08:00:00 UTC"
RUNS = {
    "golden-allreduce": ["members"],
    "golden-local": ["members"],
    "golden-gossip": ["topology", "members"],
    "golden-pipeline": ["stages", "members"],
    "golden-fedavg": ["clients", "rounds", "client-times", "members"],
    "golden-silos": ["clients", "rounds", "members", "parties"],
    "golden-population": ["lineage", "scores", "hyperparameters", "members", "parties"],
    "golden-failed": ["members"],
    "golden-waiting": ["members"],
}


@pytest.mark.parametrize("run_id", RUNS)
def test_each_strategy_has_its_panel_in_a_page_without_scripts(run_id: str) -> None:
    run = reported(run_id)
    assert [panel.name for panel in strategy_panels(run)] == RUNS[run_id]
    text = page(run, MADE_AT)
    assert page(run, MADE_AT) == text
    assert page(run, "another time").replace("another time", MADE_AT) == text
    tags = Tags(text)
    assert "script" not in {tag for tag, _ in tags.found}
    for _, attributes in tags.found:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    links = [attributes["href"] for tag, attributes in tags.found if tag == "a"]
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert links == [f"#{each}" for each in ids]
    assert len(ids) == len(set(ids)) >= 4
    # Every picture stands there for wide and for narrow screens, and as numbers.
    pictures = len(RUNS[run_id]) + len(curve_panels(run)) + 1
    assert text.count("<svg") == 2 * pictures
    assert text.count("<summary>Numbers</summary>") == pictures


def test_the_error_of_the_users_code_comes_before_everything() -> None:
    error = UserError("ValueError", "bad hidden", "Traceback\n  line 3", "worker-1", "step 3")
    text = page(reported("golden-failed", error=error, phase=Phase.FAILED), MADE_AT)
    assert text.index("bad hidden") < text.index("<nav")
    assert "in your code on worker-1, step 3" in text
    assert "Traceback\n  line 3" in text


@pytest.mark.parametrize("odd", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_what_others_have_named_is_never_markup(odd: str) -> None:
    error = UserError(odd, odd, odd, odd, odd)
    run = reported("golden-population", error=error, reason=odd, submitted_by=odd)
    events = [
        replace(event, sentence=odd, payload=_with(odd, event.payload))
        for event in golden("golden-population")
    ]
    job = {**run.job, "name": odd, "evaluation": {"split": odd, "best": odd}}
    changes = {"job": job, "name": odd, "error": error, "reason": odd, "metrics": {odd: 1.0}}
    shown = ReportedRun.of(reported("golden-population", **changes).status, events)
    worker = Worker(odd, odd, odd, True, 0.0, odd, odd, 1, 1, odd, (odd,), (odd,), (odd,), odd)
    for text in (
        page(shown, odd),
        run_html(shown),
        ListedEvents(events)._repr_html_(),
        ListedRuns([shown.status])._repr_html_(),
        ListedWorkers([worker])._repr_html_(),
    ):
        assert not HARMFUL.search(text)
        Tags(text)


def _with(odd: str, value: Any) -> Any:
    """The payload with a text in the names of metrics and workers, and in reasons."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {
            key: f"{each}{odd}" if key in ("worker_id", "reason") and each else _with(odd, each)
            for key, each in value.items()
        }
        named = {f"{name}{odd}": each for name, each in found.get("metrics", {}).items()}
        return {**found, **({"metrics": named} if named else {})}
    return [_with(odd, each) for each in value] if isinstance(value, list) else value


def test_the_winner_of_a_population_is_said_with_its_schedule() -> None:
    text = page(reported("golden-population"), MADE_AT)
    assert "The winner&#x27;s schedule" in text or "The winner's schedule" in text
    assert "Best: member 3, model.kwargs.dropout" in text


def test_nested_parties_are_a_tree() -> None:
    run = reported("golden-silos")
    tree = next(panel for panel in strategy_panels(run) if panel.name == "parties").draw(720)
    assert [row[:3] for row in tree.table.rows] == [
        (f"client{n}", "DataParallel/AllReduce", "3 segments") for n in range(2)
    ]
    for row in tree.table.rows:
        line = run.course.parties[row[0]].lines["train.loss"]
        assert row[3:] == (short(line.last[0]), short(line.last[-1]), "")


def test_the_parties_of_a_strategy_of_somebodys_own_are_told_by_what_they_have_done() -> None:
    run = reported("golden-fedavg")
    events = [
        replace(each, payload={**each.payload, "party": "a/b10"})
        if "party" in each.payload
        else each
        for each in golden("golden-fedavg")
    ]
    events += [
        replace(each, payload={**each.payload, "party": "a/b9"})
        for each in golden("golden-pipeline")
        if each.kind in ("MembersFormed", "SegmentFinished")
    ]
    payload = {"party": "", "kind": "rung", "reason": "1: a/b10 goes on", "data": {}}
    events.append(replace(events[-1], kind="Noted", payload=payload))
    failed = {"party": "a/b9", "reason": "no rows"}
    events.append(replace(events[-1], kind="PartyFailed", payload=failed, sentence="a/b9 failed"))
    job = {**run.job, "strategy": {"type": "Custom", "coordinator": "Mine", "config": {}}}
    status = reported("golden-fedavg", job=job).status
    panels = {panel.name: panel for panel in strategy_panels(ReportedRun.of(status, events))}
    assert list(panels) == [
        *("decisions", "members", "parties"),
        *(f"a/b10:{name}" for name in ("clients", "rounds", "client-times")),
    ]
    assert [row[1:] for row in panels["decisions"].draw(720).table.rows] == [
        ("rung", "1: a/b10 goes on")
    ]
    rows = panels["parties"].draw(720).table.rows
    assert [row[:2] for row in rows] == [
        *(("a", ""), ("a/b9", "ModelParallel"), ("a/b10", "Federated")),
    ]
    assert rows[1][-1] == "a/b9 failed"
    assert "1 have failed" in panels["parties"].draw(340).description


def test_every_member_of_a_population_of_pipelines_has_its_stages() -> None:
    run = reported("golden-pipeline")
    events = [
        replace(each, payload={**each.payload, "party": f"member{member}"})
        for each in golden("golden-pipeline")
        if "party" in each.payload
        for member in range(20)
    ]
    inner = {"type": "DataParallel", "num_replicas": 1, "options": {"inner": run.strategy}}
    strategy = {"type": "PopulationBased", "options": {"inner": inner}}
    job = {**run.job, "strategy": strategy}
    status = reported("golden-pipeline", job=job).status
    panels = strategy_panels(ReportedRun.of(status, events))
    stages = [panel for panel in panels if panel.name.endswith(":stages")]
    assert [panel.name for panel in stages] == [f"member{n}:stages" for n in range(12)]
    assert stages[0].draw(720).table == strategy_panels(run)[0].draw(720).table
    tree = next(panel for panel in panels if panel.name == "parties")
    assert tree.note == "The pictures of 8 more parties are left out."
    assert len(tree.draw(720).table.rows) == 20


def test_a_pipeline_has_the_bubble_and_the_memory_that_were_measured_and_work_as_long() -> None:
    run = reported("golden-pipeline")
    ranks = len(run.course.root.ranks)
    one = recorded(1, [0.5, 0.25], certain=2)
    own = {
        f"stage/{stage}": {"busy_s": one, "memory_bytes": one, **({} if stage else {"span_s": one})}
        for stage in range(ranks)
    }
    history = History(
        replace(series, name=name, party=party)
        for party, of_one in own.items()
        for name, series in of_one.items()
    )
    asked, parties = recorded_of(run.job)
    assert all(name.partition(":")[2] in asked for name in history)
    assert {name.partition(":")[0] for name in history} < set(parties)
    shown = replace(run, history=history)
    panels = {panel.name: panel for panel in strategy_panels(shown)}
    assert list(panels) == ["stages", "bubble", "stage-memory", "members"]
    tasks = panels["stages"].draw(720).table.rows
    for rank in range(max(run.course.root.ranks) + 1):
        ends = [row[4] for row in tasks if row[0] == f"stage {rank}"]
        assert ends[-1].endswith(" s"), "times are seconds"
    steps, shares = history.bubble()
    rows = panels["bubble"].draw(720).table.rows
    expected = [("bubble", str(s), short(100 * x)) for s, x in zip(steps, shares, strict=True)]
    assert list(rows) == expected
    assert f"was {shares[-1]:.0%}." in panels["stages"].note
    memory = panels["stage-memory"].draw(720).table.rows
    assert {row[0] for row in memory} == {f"stage {stage}" for stage in range(ranks)}
    assert curve_panels(shown)[0].draw(720).table == curve_panels(run)[0].draw(720).table


def test_a_pipeline_shows_when_its_stages_did_what_once_they_have_told() -> None:
    run = reported("golden-pipeline")
    ranks = run.course.root.ranks
    one = recorded(1, [0.5], certain=1)
    actions = [
        [StageAction("forward", 0, 0.0, 0.25), StageAction("backward", 0, 1.25, 1.5, 0.75)],
        [StageAction("forward", 0, 0.5, 0.75, 0.5), StageAction("backward", 0, 0.75, 1.0)],
    ]
    reports = [
        StageReport(rank, [], its, 9.0, 77) for rank, its in zip(ranks, actions, strict=True)
    ]
    values = {
        f"{party_of_stage(stage)}:{name}": value
        for stage, report in enumerate(reports)
        for name, value in report.values.items()
    }
    asked, parties = recorded_of(run.job)
    assert all(name.partition(":")[2].startswith("action.") for name in values)
    assert "action.*" in asked
    assert {name.partition(":")[0] for name in values} < set(parties)
    history = History(
        replace(
            one,
            name=name.partition(":")[2],
            party=name.partition(":")[0],
            columns=replace(one.columns, last=np.array([value])),
        )
        for name, value in values.items()
    )
    (panel,) = (
        each for each in strategy_panels(replace(run, history=history)) if each.name == "stages"
    )
    drawn = panel.draw(720)
    assert list(drawn.table.rows) == [
        ("stage 0", "forward", "0", "0 s", "0.25 s"),
        ("stage 0", "wait", "0", "0.5 s", "1.25 s"),
        ("stage 0", "backward", "0", "1.25 s", "1.5 s"),
        ("stage 1", "wait", "0", "0 s", "0.5 s"),
        ("stage 1", "forward", "0", "0.5 s", "0.75 s"),
        ("stage 1", "backward", "0", "0.75 s", "1 s"),
    ]
    assert "67% of the time is idle" in drawn.description
    assert panel.note.startswith("Measured in step 1,")
    assert "clocks" not in panel.note, "both are on one machine"
    part = History([replace(one, name="train.loss", party="")])
    assert part.with_newest_of(history).keys() == {"train.loss", *values}


def test_a_coordinator_that_was_away_has_a_lane_among_the_members_and_in_the_time_line() -> None:
    run = reported("golden-pipeline")
    assert "coordinator" not in time_line_panel(run).draw(720).description
    at = next(n for n, each in enumerate(run.events) if each.kind == "SegmentFinished") + 1
    events: list[Event] = [
        replace(
            each,
            time_s=each.time_s + (12.0 if number >= at else 0.0),
            leader_s=1.0 + each.time_s - run.events[0].time_s,
        )
        for number, each in enumerate(golden("golden-pipeline"))
    ]
    away = ReportedRun.of(run.status, events)
    (panel,) = (each for each in strategy_panels(away) if each.name == "members")
    row = panel.draw(720).table.rows[0]
    since = duration(events[at - 1].time_s - events[0].time_s)
    assert (row[0], row[2], row[4]) == ("coordinator", since, "coordinator away, 12 s at most")
    assert "coordinator away, 12 s at most" in panel.draw(720).description
    assert "continued with what they had" in panel.note
    rows = time_line_panel(away).draw(720).table.rows
    assert rows[0] == ("coordinator", "coordinator away", "1", "12 s")
    assert rows[1:] == time_line_panel(run).draw(720).table.rows


def test_a_failed_run_says_what_is_committed_where_it_failed_and_what_is_not_kept() -> None:
    error = UserError("ValueError", "bad row", "", "worker-1", "training step 47")
    kept = recorded(1, [0.5, 0.25], certain=2)
    history = History([replace(kept, name="train.loss", party="")])
    failed: dict[str, Any] = {"phase": Phase.FAILED, "num_steps": 100}
    run = replace(reported("golden-pipeline", error=error, **failed), history=history)
    step = max(each.step for each in run.status.commits)
    words = f"committed to step {step} of 100; failed in step 47"
    assert words in page(run, MADE_AT)
    assert words in header_html(run.status)
    loss = curve_panels(run)[0]
    last = max(run.course.root.lines["test.loss"].step)
    assert loss.note.startswith(f"The steps after {last:,} are not kept: the run failed in step 47")
    assert "not kept" not in curve_panels(reported("golden-pipeline"))[0].note
    near = replace(error, activity=f"training step {last + 1}")
    at_once = reported("golden-pipeline", error=near, **failed)
    assert "not kept" not in curve_panels(at_once)[0].note


def test_a_population_inside_another_has_pictures_of_its_own() -> None:
    """The events of a run, once as those of a party, and once with another population around."""
    run = reported("golden-population")
    whole = golden("golden-population")
    inside = [
        replace(each, payload={**each.payload, "party": f"member1/{party}".strip("/")})
        for each in whole
        if (party := each.payload.get("party")) is not None
    ]
    strategy = {**run.strategy, "options": {"inner": run.strategy}}
    job = {**run.job, "strategy": strategy}
    nested = ReportedRun.of(reported("golden-population", job=job).status, [*whole, *inside])
    own = {panel.name: panel for panel in strategy_panels(run)}
    found = {panel.name: panel for panel in strategy_panels(nested)}
    for name in ("lineage", "scores", "hyperparameters"):
        assert found[f"member1:{name}"].draw(720).table == own[name].draw(720).table
        assert found[name].draw(720).table == own[name].draw(720).table
    by_somebody = {**run.job, "strategy": {"type": "Custom", "coordinator": "x", "config": {}}}
    told = ReportedRun.of(reported("golden-population", job=by_somebody).status, inside)
    assert "member1:lineage" in {panel.name for panel in strategy_panels(told)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "at each step after which the differences are summed. Shows the first 2 of 4 replicas.",
        ),
        ({"fragments": 4, "overlap_steps": 5}, "one of 4 parts of the parameters, in turn"),
    ],
)
def test_replicas_with_local_steps_say_how_far_they_have_moved(
    options: dict[str, Any], said: str
) -> None:
    run = reported("golden-allreduce")
    strategy = {**run.strategy, "options": {"local_steps": 20, **options}}
    one = replace(recorded(1, [0.5, 0.25], certain=2), name="train.drift")
    of_each = [replace(one, party=f"replica/{number}") for number in range(2)]
    told = reported("golden-allreduce", job={**run.job, "strategy": strategy})
    run = replace(told, history=History(of_each))
    panels = {panel.name: panel for panel in strategy_panels(run)}
    rows = panels["replica-drift"].draw(720).table.rows
    assert [row[:3] for row in rows] == [
        (f"replica {number}", step, drift)
        for number in range(2)
        for step, drift in (("1", "0.5"), ("2", "0.25"))
    ]
    assert said in panels["replica-drift"].note
    assert ("5 steps later" in panels["replica-drift"].note) == bool(options)
    assert "replica-loss" not in panels
    _, parties = recorded_of({"strategy": strategy})
    assert parties[:2] == ("", "replica/0")


def test_nodes_that_gossip_have_a_loss_each() -> None:
    run = reported("golden-gossip")
    one = recorded(1, [0.5, 0.25], certain=2)
    history = History([replace(one, party="node/0"), replace(one, party="node/1")])
    panels = {panel.name: panel for panel in strategy_panels(replace(run, history=history))}
    rows = panels["node-loss"].draw(720).table.rows
    assert [row[:3] for row in rows] == [
        (f"node {node}", step, loss)
        for node in range(2)
        for step, loss in (("1", "0.5"), ("2", "0.25"))
    ]
    assert panels["node-loss"].note.endswith("of 4 nodes.")
    lone = curve_panels(replace(run, history=history))[0].draw(720).table
    assert lone == curve_panels(run)[0].draw(720).table, "of two nodes nothing is known"


def test_the_loss_of_nodes_that_gossip_is_their_mean_at_every_step() -> None:
    run = reported("golden-gossip")
    drawn = np.random.default_rng(5).normal(size=(4, 3))
    nodes = [
        replace(recorded(1, of_one.tolist(), certain=2), party=f"node/{n}")
        for n, of_one in enumerate(drawn)
    ]
    further = recorded(1, [*drawn[3].tolist(), 9.0], certain=3)
    ahead = History([*nodes[:3], replace(further, party="node/3")])
    line = with_history(run.course.root.lines, ahead, 4)["train.loss"]
    assert line.step == [1, 2, 3], "that all nodes have"
    assert line.last == [math.fsum(column) / 4 for column in drawn.T.tolist()]
    least, greatest = np.min([n.min for n in nodes], axis=0), np.max([n.max for n in nodes], axis=0)
    assert (line.low, line.high) == (least.tolist(), greatest.tolist())
    assert line.provisional_from == 2.0
    panel = curve_panels(replace(run, history=ahead))[0]
    assert panel.note.startswith("train.loss: the plain mean over the nodes")
    none = replace(nodes[1], columns=Columns(*(each[:0] for each in nodes[1].columns.arrays)))
    mean = mean_line("mean", [nodes[0], none])
    assert mean is None, "they have no step in common"


def test_losses_share_a_frame_and_rounds_are_counted_where_there_are_rounds() -> None:
    curves = curve_panels(reported("golden-fedavg"))
    loss = curves[0].draw(720)
    assert {row[0] for row in loss.table.rows} == {"train.loss", "test.loss"}
    assert loss.table.headings[1] == "round"
    assert [row[1] for row in loss.table.rows if row[0] == "train.loss"] == ["1", "2", "3"]
    assert curves[1].name == "test.accuracy"


def test_the_step_history_takes_the_place_of_what_the_facts_say_of_training() -> None:
    run = reported("golden-allreduce")
    history = {
        "train.loss": recorded(2, [4.0, 3.0, float("nan"), 2.0, 1.5], certain=4),
        "train.lr": recorded(2, [0.1] * 5, certain=4),
        "train.lr.group1": recorded(2, [0.2] * 5, certain=4),
        "train.grad_norm": recorded(2, [1.0] * 5, certain=4),
    }
    curves = {panel.name: panel for panel in curve_panels(replace(run, history=history))}
    assert {"loss", "test.accuracy", "train.lr", "train.grad_norm"} <= curves.keys()
    assert "train.max_grad_norm" not in curves
    loss = curves["loss"].draw(720)
    rows = [row[1:] for row in loss.table.rows if row[0] == "train.loss"]
    assert rows[0] == ("2", "4", "2", "8")
    assert rows[2][:2] == ("6", "not finite")
    assert rows[-1] == ("10", "1.5", "0.75", "3")
    assert 'stroke-opacity="0.45"' in loss.svg, "what is not certain is paler"
    assert {row[0] for row in curves["train.lr"].draw(720).table.rows} == {
        *("train.lr", "train.lr.group1")
    }


def test_what_workers_do_for_the_clients_of_a_federation_is_in_their_lanes() -> None:
    run = reported("golden-fedavg")
    panel = next(each for each in strategy_panels(run) if each.name == "members")
    rows = panel.draw(720).table.rows
    clients = [(row[0], row[4]) for row in rows if row[4].startswith("client ")]
    trained = [
        (client.worker_id, f"client {client.client}, round {each.number}: {client.state}")
        for each in run.course.root.rounds
        for client in each.clients
    ]
    assert sorted(clients) == sorted(trained)
    assert {row[1] for row in rows} == {"clients", "member that evaluates"}


def test_what_a_run_counts_is_said() -> None:
    for run_id, unit in (
        ("golden-local", "steps"),
        ("golden-fedavg", "rounds"),
        ("golden-population", "generations"),
    ):
        run = reported(run_id)
        assert f"12 of 12 {unit}" in page(run, MADE_AT)
        assert f"12 of 12 {unit}" in header_html(run.status)


def test_curves_can_have_a_logarithmic_axis_and_say_what_they_are() -> None:
    run = reported("golden-allreduce")
    curves = {panel.name: panel for panel in curve_panels(run)}
    loss = curves["loss"]
    assert loss.picture(400, log=True).svg != loss.picture(400).svg == loss.draw(400).svg
    assert loss.picture(400, log=True).table == loss.draw(400).table
    for panel in strategy_panels(run):
        assert panel.picture(400, log=True) == panel.draw(400)
    assert "the greatest norm" in curves["train.max_grad_norm"].note


def test_a_topology_has_all_nodes_and_the_worker_of_each_however_few_workers_there_are() -> None:
    run = reported("golden-gossip")  # four nodes on three workers
    drawn = {panel.name: panel for panel in strategy_panels(run)}["topology"].draw(360)
    assert [row[:2] for row in drawn.table.rows] == [
        ("node 0 on worker-0", "node 1 on worker-0"),
        ("node 0 on worker-0", "node 3 on worker-2"),
        ("node 1 on worker-0", "node 2 on worker-1"),
        ("node 2 on worker-1", "node 3 on worker-2"),
    ]
    assert drawn.svg.count(">0.3333</text>") == 4


def test_what_is_searched_on_a_log_scale_has_a_logarithmic_axis() -> None:
    run = reported("golden-population")  # its learning rates are close to each other
    dimensions = run.job["search_space"]["dimensions"]
    linear = [{**each, "scale": "Linear"} for each in dimensions]
    job = {**run.job, "search_space": {**run.job["search_space"], "dimensions": linear}}
    ticks = []
    for each in (run, reported("golden-population", job=job)):
        panel = {panel.name: panel for panel in strategy_panels(each)}["hyperparameters"]
        drawn = panel.draw(720).svg
        third = re.findall(r'<text class="sg-f-muted[^>]* x="459.3" y="([\d.]+)"', drawn)
        apart = [abs(float(a) - float(b)) for a, b in pairwise(third)]
        ticks.append(max(apart) - min(apart))
    assert ticks[0] > 4
    assert ticks[1] < 1
