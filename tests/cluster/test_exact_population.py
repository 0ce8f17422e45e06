"""Population based training over real processes has the bits of a loop in one process."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stratagem.client.sdk.blocking import Client
from stratagem.client.terminal.tables import print_status, to_json
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import with_fields
from tests.cluster.jobs import (
    SPACE,
    Gates,
    Outcome,
    assert_same_bits,
    data_parallel,
    outcome_of,
    population,
    train,
    wait_for,
)
from tests.jobs import job, user_data, user_model
from tests.reference.population_loop import population_loop
from tests.stream_jobs import streamed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("members train, are compared and copy each other as in one process"),
]


def copies_of(outcome: Outcome) -> list[dict[int, int]]:
    payloads = [event.payload for event in outcome.of("GenerationClosed")]
    return [{each["member"]: each["donor"] for each in p["copied"]} for p in payloads][:-1]


CASES: dict[str, dict[str, Any]] = {
    "truncation and perturbation": {},
    "binary and resample": {
        "exploit": {"method": "Binary", "threshold": 0.01},
        "explore": {"method": "Resample"},
    },
    "more members than workers, compared by averages": {
        "size": 7,
        "model": "dropout_mlp",
        "optimizer": {"name": "adam", "lr": 0.01},
        "weight_average": {"kind": "ema", "decay": 0.9},
        "evaluation": {"of": "average", "best": "loss", "mode": "min"},
        "search_space": {"optimizer.lr": SPACE["optimizer.lr"]},
    },
    "the user's optimizers and schedule, which is stepped anew for another rate": {
        "optimizer": {
            "entrypoint": "tests.userland.optimizers:SignMomentum",
            "lr": 0.01,
            "schedule": "tests.userland.schedules:sequential",
            "groups": [
                {"name": "head", "match": ["2.*"], "optimizer": {"name": "adamw", "lr": 0.01}}
            ],
        },
        "search_space": {
            "optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"},
            "optimizer.groups.head.optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"},
        },
    },
    "streams, which a copy reads on where its donor was": {
        "model": "dropout_mlp",
        "data": streamed("shards", streams=3, shuffle_rows=4, stateful=True),
    },
}


@pytest.mark.parametrize(
    "case",
    [
        "binary and resample",
        *(pytest.param(c, marks=pytest.mark.sweep) for c in CASES if c != "binary and resample"),
    ],
)
def test_bits_of_the_population_loop(client: Client, case: str) -> None:
    spec = population(**CASES[case])
    outcome = train(client, spec)
    state, history = population_loop(spec)
    assert copies_of(outcome) == history
    assert any(history)
    assert_same_bits(outcome.state, state)
    assert outcome.status.reproducible


CONDITIONAL = {
    "optimizer.lr": SPACE["optimizer.lr"],
    "optimizer.nesterov": {"choices": [True, False]},
    "optimizer.momentum": {"low": 0.1, "high": 0.9, "when": {"optimizer.nesterov": [True]}},
}


@pytest.mark.sweep
def test_a_conditional_parameter_is_that_of_its_own_member(client: Client) -> None:
    """A member without the parameter has the job's own value, and a run leaves nothing behind that
    another one of the same coordinator would see."""
    spec = population(
        search_space=CONDITIONAL,
        explore={"method": "Perturbation", "factor": 0.2},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.05},
    )
    state, history = population_loop(spec)
    first, second = train(client, spec), train(client, spec)
    formed = [outcome.of("PopulationFormed")[0].payload["params"] for outcome in (first, second)]
    assert formed[0] == formed[1]
    assert {"optimizer.momentum" in params for params in formed[0]} == {True, False}
    for outcome in (first, second):
        assert copies_of(outcome) == history
        assert_same_bits(outcome.state, state)
        assert outcome.status.job == spec.document()
        assert client.submit(spec, outcome.run.run_id).run_id == outcome.run.run_id


STRUCTURAL: dict[str, Any] = {
    "model.kwargs.width": {"choices": [6, 8, 12], "ordered": True},
    "model.kwargs.depth": {"low": 1, "high": 3},
    "model.kwargs.dropout": {"low": 0.0, "high": 0.5},
    "optimizer.name": {"choices": ["sgd", "adam"]},
    "optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"},
    "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer.name": ["sgd"]}},
    "optimizer.amsgrad": {"choices": [True, False], "when": {"optimizer.name": ["adam"]}},
}
FOUND = {"model.kwargs.width", "model.kwargs.depth", "optimizer.amsgrad"}


@pytest.mark.sweep
def test_what_decides_the_layout_goes_with_the_state(client: Client) -> None:
    """Width, depth and optimizer are in the space; what may change under a state still does."""
    spec = population(
        size=6,
        model=user_model("tower"),
        search_space=STRUCTURAL,
        optimizer={"name": "sgd", "lr": 0.1},
        exploit={"method": "Binary", "threshold": 0.0},
        explore={"method": "Perturbation", "factor": 0.2},
    )
    outcome = train(client, spec)
    state, history = population_loop(spec, frozenset({*FOUND, "optimizer.name"}))
    turned = dict(reversed(STRUCTURAL.items()))
    assert with_fields(spec, {"search_space": turned}) == spec
    assert not outcome.of("PartyFailed")
    assert re.fullmatch(
        r"3 generations committed; member \d is best, with [^;]*", outcome.status.reason
    )
    assert copies_of(outcome) == history
    assert any(history)
    assert_same_bits(outcome.state, state)
    assert outcome.status.reproducible
    found = [set(event.payload["structural"]) for event in outcome.of("ModelBuilt")]
    assert set().union(*found) == FOUND
    (formed,) = outcome.of("PopulationFormed")
    assert formed.payload["structural"] == ["optimizer.name"]
    params = dict(enumerate(formed.payload["params"]))
    varied = set()
    for event in outcome.of("GenerationClosed"):
        before = dict(params)
        for copied in event.payload["copied"]:
            own = params[copied["member"]] = copied["params"]
            theirs = before[copied["donor"]]
            assert all(own.get(name) == theirs.get(name) for name in (*FOUND, "optimizer.name"))
            varied |= {name for name in own if own[name] != theirs.get(name)}
    assert {"optimizer.lr", "model.kwargs.dropout"} <= varied


def printed(outcome: Outcome) -> list[str]:
    """The last lines of `run`, and all of `status`."""
    text = io.StringIO()
    print_status(Console(width=300, file=text), outcome.status)
    return text.getvalue().splitlines()


@pytest.mark.sweep
def test_the_result_says_what_it_was_trained_with(client: Client, tmp_path: Path) -> None:
    outcome = train(client, population(size=4, generations=4))
    result, last = outcome.run.result(), outcome.of("GenerationClosed")[-1].payload
    assert result.hyperparameters == last["params"]
    assert result.schedule[-1].values == last["params"]
    assert result.schedule[0].from_step == 0
    (formed,) = outcome.of("PopulationFormed")
    assert result.schedule[0].values in formed.payload["params"]
    best = result.status.commit("best")
    assert best is not None
    told = outcome.run.population()
    assert told.best is not None
    assert (told.best.generation, told.best.member) == (best.segment, best.member)
    assert list(told.schedule(told.best.member, told.best.generation)) == [
        (each.from_step, each.values) for each in best.schedule
    ]
    assert f"Best: {told.best}" in outcome.run.report(tmp_path / "report.html").read_text()
    lr = f"optimizer.lr {best.hyperparameters['optimizer.lr']:.6g}"
    (line,) = [text for text in printed(outcome) if text.startswith("best ")]
    assert f"segment {best.segment}, member {best.member}: {lr}, optimizer.momentum " in line
    commits = json.loads(to_json(result.status))["commits"]
    assert commits[-1]["hyperparameters"] == last["params"]
    assert commits[-1]["schedule"][-1]["values"] == last["params"]
    assert f"member {last['best']} is best, with optimizer.lr " in outcome.status.reason


@pytest.mark.sweep
def test_a_model_of_another_width_says_what_the_state_was_trained_with(client: Client) -> None:
    widths = {"model.kwargs.width": {"choices": [6, 8]}}
    spec = population(size=2, generations=1, model=user_model("tower"), search_space=widths)
    done = train(client, spec)
    width = done.run.result().hyperparameters["model.kwargs.width"]
    initial = {"run": done.run.run_id, "which": "best"}
    fitting = client.submit(job(user_model("tower", width=width), initial=initial, steps=1))
    fitting.result()
    assert fitting.status().job["initial"]["trained_with"] == {"model.kwargs.width": width}
    run = client.submit(job(user_model("tower", width=14 - width), initial=initial, steps=1))
    with pytest.raises(UserCodeError) as raised:
        run.result()
    assert "but the model has torch.float32" in str(raised.value)
    hint = f"the state was trained with model.kwargs.width {width}; give the job these"
    assert raised.value.message.endswith(hint)


@pytest.mark.sweep
def test_members_that_gossip_have_the_same_bits_twice(client: Client) -> None:
    ring = {**data_parallel(3), "aggregation": {"method": "Decentralized", "topology": "ring"}}
    spec = population(size=2, generations=2, options={"inner": ring})
    first, second = train(client, spec), train(client, spec)
    assert [e.payload["digest"] for e in first.of("GenerationClosed")] == [
        e.payload["digest"] for e in second.of("GenerationClosed")
    ]
    assert_same_bits(first.state, second.state)


@pytest.mark.sweep
def test_a_member_whose_code_raises_is_replaced(client: Client) -> None:
    """Members that drew at_call 2 raise in their second forward; the run goes on without them."""
    spec = population(
        model=user_model("acting_models:Failing", at_call=1000),
        search_space={
            "optimizer.lr": SPACE["optimizer.lr"],
            "model.kwargs.at_call": {"choices": [2, 1000]},
        },
        explore={"method": "Perturbation", "factor": 0.1},
        optimizer={"name": "sgd", "lr": 0.1},
    )
    outcome = train(client, spec)
    scores = [event.payload["scores"] for event in outcome.of("GenerationClosed")]
    failed = {number for number, score in enumerate(scores[0]) if score is None}
    assert failed
    assert len(failed) < 4
    assert failed <= copies_of(outcome)[0].keys()
    assert all(score is not None for score in scores[1])
    assert {event.payload["error"]["type"] for event in outcome.of("PartyFailed")} == {"KeyError"}


@pytest.mark.sweep
def test_asynchronous_members_go_on_alone(client: Client, gates: Gates) -> None:
    """Nobody waits for the member that is held; the result says that it depends on who was late."""
    spec = population(
        size=2,
        options={"asynchronous": True},
        data=user_data("gated", folder=str(gates.folder)),
        generations=3,
    )
    gates.close("worker-0-batch-2")
    run = client.submit(spec)
    wait_for(run, "MemberEvolved", 3)
    gates.open()
    outcome = outcome_of(run)
    members = [event.payload["member"] for event in outcome.of("MemberEvolved")]
    assert len(set(members[:3])) == 1
    assert sorted(members) == [0, 0, 0, 1, 1, 1]
    assert not outcome.status.reproducible
