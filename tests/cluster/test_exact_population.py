"""Population based training over real processes has the bits of a loop in one process."""

import copy
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.terminal.tables import print_status, to_json
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec, member_job, with_fields
from stratagem.common.strategy import PopulationBased
from stratagem.coordinator.strategies.population.evolution import donors, draw, explored, stream
from stratagem.worker.data.data_sources import DataSources, load_data
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.stream_dataset import StreamDataset
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.optim.optimizers import make_optimizer
from stratagem.worker.models.model_builder import build_model
from stratagem.worker.models.model_dtypes import rows_dtype
from tests.cluster.jobs import (
    ALLOWED,
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
from tests.reference.objective import objective_of
from tests.reference.rates import Rates
from tests.reference.row_batches import epoch_batches, read
from tests.reference.stream_rows import PlainStreams
from tests.reference.weight_average import RunningAverage
from tests.stream_jobs import streamed

pytestmark = pytest.mark.cluster


@dataclass
class Member:
    """A member of the reference: an ordinary training loop that can be copied."""

    spec: JobSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: Rates
    params: dict[str, Any]
    average: RunningAverage
    step: int = 0

    @classmethod
    def begin(cls, spec: JobSpec, params: dict[str, Any]) -> "Member":
        model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
        optimizer = _optimizer_of(spec, model)
        average = RunningAverage(spec.weight_average, list(model.parameters()))
        rates = Rates(spec, optimizer, spec.steps or 0, ALLOWED)
        return cls(spec, model, optimizer, rates, params, average)

    def train(self, num_steps: int) -> None:
        data = load_data(self.spec, ALLOWED, DataSources())["train"]
        source = PlainStreams(self.spec, data) if isinstance(data, StreamDataset) else data
        gather = Gather(rows_dtype(self.spec, self.model), torch.device("cpu"))
        loss_fn = objective_of(self.spec, ALLOWED)
        randomness = KeyedRandomness(self.model, torch.device("cpu"))
        per_epoch = len(epoch_batches(self.spec, ALLOWED, data, 0))
        self.model.train()
        for _ in range(num_steps):
            epoch, position = divmod(self.step, per_epoch)
            rows = epoch_batches(self.spec, ALLOWED, data, epoch)[position]
            row_key, key = (self.spec.seed, "row", epoch), (self.spec.seed, self.step, 0, 0)
            x, y = read(gather, source, rows, row_key, key, randomness)
            value = loss_fn(self.model, x, y, len(rows))
            self.optimizer.zero_grad()
            (value.mean * value.weight).backward()
            for param in self.model.parameters():
                assert param.grad is not None
                param.grad /= value.weight
            self.rates.before(self.step)
            self.optimizer.step()
            self.rates.after()
            self.step += 1
            self.average.update(self.step)

    def loss(self) -> float:
        data = load_data(self.spec, ALLOWED, DataSources())["test"]
        gather = Gather(rows_dtype(self.spec, self.model), torch.device("cpu"))
        keys = ("row", "evaluate", "test"), ("evaluate", "test", 0)
        x, y = read(gather, data, torch.arange(len(data)), *keys)
        measured = copy.deepcopy(self.model).eval()
        measured.load_state_dict(self.average.model_state(self.model) or self.model.state_dict())
        with torch.no_grad():
            value = objective_of(self.spec, ALLOWED)(measured, x, y, len(data))
        return float(value.mean)

    def copy_of(self, spec: JobSpec, params: dict[str, Any]) -> "Member":
        model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
        model.load_state_dict(self.model.state_dict())
        optimizer = _optimizer_of(spec, model)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for old, new in pairs:
            optimizer.state[new] = copy.deepcopy(self.optimizer.state[old])
        average = self.average.copied(list(model.parameters()))
        rates = Rates(spec, optimizer, spec.steps or 0, ALLOWED, behind=self.step)
        return Member(spec, model, optimizer, rates, params, average, self.step)


def _optimizer_of(spec: JobSpec, model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(spec.optimizer, model.named_parameters(), entrypoints=ALLOWED)


def population_loop(
    spec: JobSpec, structural: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[dict[int, int]]]:
    """(the best member's state after the last generation, who copied whom in each).

    structural: hyperparameters that a copy has from its donor, as it has the state.
    """
    strategy = spec.strategy
    assert isinstance(strategy, PopulationBased)
    assert spec.search_space is not None
    assert spec.steps_per_generation is not None
    drawn = [
        draw(spec.search_space, stream(spec.seed, m, 0)) for m in range(strategy.population_size)
    ]
    members = [Member.begin(member_job(spec, m, params), params) for m, params in enumerate(drawn)]
    history = []
    for generation in range(1, strategy.generations + 1):
        for member in members:
            member.train(spec.steps_per_generation)
        losses = [member.loss() for member in members]
        if generation == strategy.generations:
            break
        rngs = [stream(spec.seed, m, generation) for m in range(len(members))]
        copies = donors(strategy.exploit, [-loss for loss in losses], rngs)
        history.append(copies)
        old = list(members)
        for number, donor in copies.items():
            params = explored(
                strategy.explore, spec.search_space, old[donor].params, rngs[number], structural
            )
            members[number] = old[donor].copy_of(member_job(spec, number, params), params)
    best = min(range(len(members)), key=lambda m: losses[m])
    return dict(members[best].model.state_dict()), history


def copies_of(outcome: Outcome) -> list[dict[int, int]]:
    payloads = [event.payload for event in outcome.of("GenerationClosed")]
    return [{each["member"]: each["donor"] for each in p["copied"]} for p in payloads][:-1]


CASES: dict[str, dict[str, Any]] = {
    "truncation and perturbation": {},
    "compared by averages": {
        "weight_average": {"kind": "ema", "decay": 0.9},
        "evaluation": {"of": "average", "best": "loss", "mode": "min"},
    },
    "binary and resample": {
        "exploit": {"method": "Binary", "threshold": 0.01},
        "explore": {"method": "Resample"},
    },
    "more members than workers, dropout, adam": {
        "size": 7,
        "model": "dropout_mlp",
        "optimizer": {"name": "adam", "lr": 0.01},
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
    "a model that returns its loss": {
        "model": user_model("returning:WordsForCausalLM"),
        "data": {"entrypoint": "tests.userland.returning:words"},
        "loss": "model",
    },
}


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize(
    ("exploit", "explore"),
    [
        ("Truncation", "Perturbation"),
        ("Binary", "Resample"),
        pytest.param("Truncation", "Resample", marks=pytest.mark.sweep),
        pytest.param("Binary", "Perturbation", marks=pytest.mark.sweep),
    ],
)
def test_what_decides_the_layout_goes_with_the_state(
    client: Client, exploit: str, explore: str
) -> None:
    """Width, depth and optimizer are in the space; what may change under a state still does."""
    ways: dict[str, dict[str, Any]] = {
        "Truncation": {"fraction": 0.5},
        "Binary": {"threshold": 0.0},
        "Perturbation": {"factor": 0.2},
        "Resample": {},
    }
    spec = population(
        size=6,
        model=user_model("tower"),
        search_space=STRUCTURAL,
        optimizer={"name": "sgd", "lr": 0.1},
        exploit={"method": exploit, **ways[exploit]},
        explore={"method": explore, **ways[explore]},
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


@pytest.mark.parametrize("inner", ["DataParallel", "Federated", "Gossip", "asynchronous"])
def test_copies_of_any_layout_fit_under_every_way_to_train(client: Client, inner: str) -> None:
    rounds = {
        "type": "Federated",
        "num_clients": 3,
        "rounds": 3,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }
    ring = {**data_parallel(2), "aggregation": {"method": "Decentralized", "topology": "ring"}}
    ways: dict[str, dict[str, Any]] = {
        "DataParallel": {"inner": data_parallel(2)},
        "Federated": {"inner": rounds},
        "Gossip": {"inner": ring},
        "asynchronous": {"asynchronous": True},
    }
    generations = 6 if inner == "asynchronous" else 2
    spec = population(
        size=4,
        generations=generations,
        model=user_model("tower"),
        search_space=STRUCTURAL,
        optimizer={"name": "sgd", "lr": 0.1},
        options=ways[inner],
    )
    outcome = train(client, spec)
    assert not outcome.of("PartyFailed")
    assert "failure" not in outcome.status.reason
    assert outcome.status.reason.startswith(f"{generations} generations committed; member ")
    if inner != "asynchronous":  # where who is late decides whether anybody copies
        assert any(event.payload["copied"] for event in outcome.of("GenerationClosed"))


def printed(outcome: Outcome) -> list[str]:
    """The last lines of `run`, and all of `status`."""
    text = io.StringIO()
    print_status(Console(width=300, file=text), outcome.status)
    return text.getvalue().splitlines()


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


def test_a_declared_dimension_is_believed(client: Client) -> None:
    """What is said to be structural is kept; what is said not to be so is varied, and the result
    says what came of it."""
    width = {"choices": [6, 8, 12], "ordered": True}
    for says in (True, False):
        spec = population(
            size=4,
            model=user_model("tower"),
            search_space={
                "model.kwargs.width": {**width, "structural": says},
                "optimizer.lr": SPACE["optimizer.lr"],
            },
            optimizer={"name": "sgd", "lr": 0.1},
        )
        outcome = train(client, spec)
        assert not any(event.payload["structural"] for event in outcome.of("ModelBuilt"))
        assert bool(outcome.of("PartyFailed")) is not says
        if not says:
            assert "failures of members, most often" in outcome.status.reason
            assert "state.0.weight: is torch.float32" in outcome.status.reason


def test_members_that_are_data_parallel(client: Client) -> None:
    """Two replicas each: other sums than one replica, but the same on any number of workers."""
    inner = data_parallel(2)
    first, second = (
        train(client, population(size=3, options={"inner": inner}, generations=2)) for _ in "ab"
    )
    assert_same_bits(first.state, second.state)
    sizes = {len(event.payload["members"]) for event in first.of("MembersFormed")}
    assert sizes == {2}
    histories = [each.run.history("train.*", "*") for each in (first, second)]
    assert {series.party for series in histories[0].values()} == {"member0", "member1", "member2"}
    for name, series in histories[0].items():
        assert (series.stride, series.step.tolist()) == (1, [*range(1, 7)])
        assert series.columns.to_bytes() == histories[1][name].columns.to_bytes()
    solo = train(client, population(size=3, generations=2))
    assert copies_of(solo) == copies_of(first)
    for name, tensor in solo.state.items():
        torch.testing.assert_close(tensor, first.state[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("inner", ["Federated", "Gossip"])
def test_members_under_other_strategies_have_the_same_bits_twice(
    client: Client, inner: str
) -> None:
    rounds = {
        "type": "Federated",
        "num_clients": 3,
        "rounds": 3,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }
    ring = {**data_parallel(3), "aggregation": {"method": "Decentralized", "topology": "ring"}}
    chosen = rounds if inner == "Federated" else ring
    spec = population(size=2, generations=2, options={"inner": chosen})
    first, second = train(client, spec), train(client, spec)
    assert [e.payload["digest"] for e in first.of("GenerationClosed")] == [
        e.payload["digest"] for e in second.of("GenerationClosed")
    ]
    assert_same_bits(first.state, second.state)


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
