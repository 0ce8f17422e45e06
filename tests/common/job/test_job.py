"""The job: what it says, what is refused, and that its canonical text gives it back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stratagem.common.base import limits
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.job import (
    DataSpec,
    EvaluationSpec,
    Every,
    ExecutionSpec,
    JobSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    PartitionSpec,
    ScheduleSpec,
    with_fields,
)
from stratagem.common.job.optimizer.optimizer_section import check_optimizer
from stratagem.common.job.optimizer.search_section import read_short_form
from stratagem.common.strategy import (
    AllReduce,
    DataParallel,
    Federated,
    Local,
    PopulationBased,
    parse_strategy,
)
from stratagem.common.strategy.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Ordinal,
    Scale,
    SearchSpace,
)
from tests.common.job.documents import MINIMAL
from tests.common.strategy.strategies import EXAMPLES, json_values, training_strategies

pytestmark = pytest.mark.core

FEDERATED: dict[str, Any] = {
    "type": "Federated",
    "num_clients": 4,
    "rounds": 3,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
RING: dict[str, Any] = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
    "options": {"all_reduce": "ring"},
}
FEDERATED_JOB: dict[str, Any] = {**MINIMAL, "epochs": None, "strategy": FEDERATED}


def wrong(document: object) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(document)
    assert "pydantic" not in str(caught.value)
    return [str(each) for each in caught.value.violations]


def test_defaults() -> None:
    job = JobSpec.parse(MINIMAL)
    assert (job.seed, job.retention, job.steps) == (0, 2, None)
    assert (job.strategy, job.evaluation, job.partition) == (Local(), None, None)
    assert job.execution == ExecutionSpec(precision=None, deterministic=True)
    assert job.checkpoint.every is None


def test_everything_that_can_be_said_is_kept() -> None:
    job = JobSpec.parse(
        {
            **MINIMAL,
            "model": {"entrypoint": "pkg.mod:Cls.build", "kwargs": {"b": None, "a": [1, 2.0]}},
            "data": {"path": "some/data.safetensors"},
            "loss": {"name": "cross_entropy", "kwargs": {"label_smoothing": 0.1}},
            "optimizer": {
                "name": "adam",
                "lr": 1,
                "betas": [0.9, 0.99],
                "kwargs": {"weight_decay": 0.1},
                "schedule": "cosine",
                "clip_norm": 1.0,
            },
            "evaluation": {"every": "100 steps", "metrics": ["accuracy"], "best": "loss"},
            "checkpoint": {"every": "1 epochs"},
            "strategy": {**json.loads(EXAMPLES[1]), "options": {"min_replicas": 2}},
            "execution": {"precision": "Full"},
        }
    )
    assert job.optimizer.kwargs == {"betas": [0.9, 0.99], "weight_decay": 0.1}
    assert job.optimizer.schedule == ScheduleSpec(name="cosine")
    assert job.evaluation is not None
    assert job.evaluation.every == Every(100, "step")
    assert job.checkpoint.every == Every(1, "epoch")
    assert job.model.kwargs == {"a": [1, 2.0], "b": None}
    text = job.canonical_json()
    assert JobSpec.from_json(text) == job
    assert JobSpec.from_json(text).canonical_json() == text
    assert '"strategy":{"type":"DataParallel","num_replicas":3,"aggregation":' in text


def test_equal_jobs_have_equal_text() -> None:
    one = JobSpec.parse({**MINIMAL, "optimizer": {"name": "sgd", "lr": 1, "b": 1, "a": 2}})
    two = JobSpec.parse(
        {**MINIMAL, "optimizer": {"kwargs": {"a": 2, "b": 1}, "lr": 1.0, "name": "sgd"}, "seed": 0}
    )
    assert one == two
    assert one.canonical_json() == two.canonical_json()


def test_the_canonical_text_is_pinned() -> None:
    assert JobSpec.parse(MINIMAL).canonical_json() == (
        '{"name":"digits","model":{"entrypoint":"examples.digits:build_model","kwargs":{}},'
        '"data":{"entrypoint":"examples.digits:load","kwargs":{}},'
        '"loss":{"name":"cross_entropy","kwargs":{}},'
        '"optimizer":{"name":"sgd","lr":0.1,"kwargs":{}},"checkpoint":{},"epochs":5,'
        '"batch_size":64,"seed":0,"strategy":{"type":"Local"},'
        '"execution":{"mode":"Eager","gradient":"Full","memory":"Standard","parallelism":"None",'
        '"fusion":false,"profiling":false,"deterministic":true},'
        '"retention":2}'
    )


def test_the_text_of_a_schedule_has_no_key_that_earlier_versions_do_not_know() -> None:
    spec = OptimizerSpec.model_validate({"name": "sgd", "lr": 0.1, "schedule": "cosine"})
    text = JobSpec.parse({**MINIMAL, "optimizer": spec.model_dump()}).canonical_json()
    assert (
        '"optimizer":{"name":"sgd","lr":0.1,"kwargs":{},"schedule":{"name":"cosine",'
        '"warmup_steps":0,"final_lr_fraction":0.0,"gamma":0.1}},' in text
    )


SPACE = SearchSpace((Float("optimizer.lr", 0.01, 1.0, Scale.LOG),), {})
POPULATION: dict[str, Any] = {
    "search_space": SPACE,
    "steps_per_generation": 3,
    "evaluation": EvaluationSpec(best="loss"),
}
POPULATION_DOCUMENT: dict[str, Any] = {
    "search_space": {"optimizer.lr": {"low": 0.01, "high": 1.0, "scale": "log"}},
    "steps_per_generation": 3,
    "evaluation": {"best": "loss"},
}


def test_a_search_space_in_short_form_is_the_shared_one() -> None:
    short = {
        "optimizer.lr": {"low": 0.01, "high": 1.0, "scale": "log"},
        "model.kwargs.depth": {"low": 1, "high": 4},
        "optimizer.name": {"choices": ["sgd", "adam"]},
        "model.kwargs.width": {"choices": [32, 64], "ordered": True},
        "optimizer.momentum": {"low": 0, "high": 0.9, "when": {"optimizer.name": "sgd"}},
    }
    assert read_short_form(short) == SearchSpace(
        (
            Float("optimizer.lr", 0.01, 1.0, Scale.LOG),
            Int("model.kwargs.depth", 1, 4, Scale.LINEAR),
            Categorical("optimizer.name", ("sgd", "adam")),
            Ordinal("model.kwargs.width", (32, 64)),
            Conditional(
                "optimizer.momentum",
                "optimizer.name",
                ("sgd",),
                Float("optimizer.momentum", 0.0, 0.9, Scale.LINEAR),
            ),
        ),
        {},
    )


@pytest.mark.parametrize(
    ("given_range", "expected"),
    [
        ({"low": 1}, "x.high: missing; or give choices"),
        ({"low": 1, "hihg": 2}, "x.hihg: unknown key; did you mean high?"),
        ({"low": 1, "high": 2, "scale": "Log"}, "x.scale: 'Log' is not one of linear, log"),
        ({"low": 3, "high": 2}, "x.low: 3 is not below high, 2"),
        ({"choices": []}, "x.choices: [] is not allowed; must not be empty"),
        ({"low": 3, "high": 2, "when": {"y": [1]}}, "x.low: 3 is not below high, 2"),
        ({"choices": [1], "ordered": 1}, "x.ordered: 1 is not true or false"),
        ({"choices": [1], "structural": None}, "x.structural: None is not true or false; leave"),
        ({"low": 1, "high": 2, "scale": {}}, "x.scale: {} is not one of linear, log, reverse_log"),
        ({"low": 1, "high": 2, "when": None}, "x.when: None is not a mapping"),
        ({"low": 1, "high": 2, "when": {}}, "x.when: names 0 fields; must name one"),
        (3, "x: 3 is not a mapping of low, high, scale"),
    ],
)
def test_ranges_that_are_refused(given_range: object, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_short_form({"x": given_range})
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"optimizer.lr": 0.5}, {"lr": 0.5, "momentum": 0.9}),
        ({"optimizer.momentum": 0.1}, {"lr": 0.1, "momentum": 0.1}),
        ({"optimizer.momentum": None}, {"lr": 0.1}),
    ],
)
def test_fields_are_set_by_path(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    job = with_fields(JobSpec.parse({**MINIMAL, "optimizer": optimizer}), fields)
    assert job == JobSpec.parse({**MINIMAL, "optimizer": {"name": "sgd", **expected}})


def test_a_field_cannot_be_set_inside_a_value() -> None:
    job = JobSpec.parse(MINIMAL)
    with pytest.raises(InvalidInputError, match="'batch_size' is a value and holds no fields"):
        with_fields(job, {"batch_size.x": 1})


@given(training_strategies, st.dictionaries(st.text("abc", min_size=1), json_values))
def test_any_strategy_and_kwargs_survive(strategy: Any, kwargs: dict[str, Any]) -> None:
    job = JobSpec(
        name="any",
        model=ModelSpec(entrypoint="m:f", kwargs=kwargs),
        data=DataSpec(inline=Digest("0" * 64)),
        loss=LossSpec(entrypoint="m:loss"),
        optimizer=OptimizerSpec(name="sgd", lr=0.5, kwargs=kwargs),
        steps=None if isinstance(strategy, Federated | PopulationBased) else 7,
        batch_size=8,
        strategy=strategy,
        **(POPULATION if isinstance(strategy, PopulationBased) else {}),
        execution=ExecutionSpec(deterministic=False),  # some strategies ask for it
    )
    assert JobSpec.from_json(job.canonical_json()) == job


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_strategy_makes_a_job(example: str) -> None:
    strategy = json.loads(example)
    sections = FEDERATED_JOB if "rounds" in strategy else MINIMAL
    if strategy["type"] == "PopulationBased":
        sections = {k: v for k, v in MINIMAL.items() if k != "epochs"} | POPULATION_DOCUMENT
    job = JobSpec.parse({**sections, "strategy": strategy})
    assert job.strategy == parse_strategy(example)


def test_names_that_an_earlier_version_accepted_are_read_from_its_journal() -> None:
    changed = JobSpec.parse(MINIMAL).canonical_json()
    changed = changed.replace('"cross_entropy"', '"their_loss"').replace('"sgd"', '"their_sgd"')
    with pytest.raises(InvalidInputError, match=r"loss.name: 'their_loss'"):
        JobSpec.from_json(changed)
    with limits.lifted():
        assert JobSpec.from_json(changed).loss.name == "their_loss"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"clip": 1.0}, "clip: unknown key; did you mean optimizer.clip_norm or privacy.clip?"),
        ({"clip_norm": 1.0}, "clip_norm: unknown key; did you mean optimizer.clip_norm?"),
        ({"precision": "Mixed"}, "precision: unknown key; did you mean execution.precision?"),
        ({"lr": 0.1}, "lr: unknown key; did you mean optimizer.lr?"),
        ({"optimiser": {}}, "optimiser: unknown key; did you mean optimizer?"),
    ],
)
def test_an_unknown_key_is_led_to_the_section_that_has_it(
    sections: dict[str, Any], said: str
) -> None:
    assert said in wrong({**MINIMAL, **sections})


def test_an_unknown_keyword_is_led_to_the_key_of_the_optimizer() -> None:
    spec = OptimizerSpec.model_validate({"name": "sgd", "lr": 0.1, "clip": 1.0})
    (violation,) = check_optimizer(spec)
    text = "optimizer.clip: 1.0, but sgd takes no 'clip'; did you mean clip_norm?; it takes damp"
    assert str(violation).startswith(text)


def test_all_wrong_fields_are_named_at_once() -> None:
    document = {
        **MINIMAL,
        "name": "two words",
        "epoch": 3,
        "batch_size": 0,
        "seed": 1.0,
        "model": {"entrypoint": "no colon", "kwarg": {}},
        "data": {"path": "data.pkl"},
        "loss": "cros_entropy",
        "optimizer": {"name": "sdg", "lr": "fast", "schedule": {"name": "cosin"}},
        "evaluation": {"metrics": ["acuracy"], "best": "accuracy"},
        "strategy": {**json.loads(EXAMPLES[1]), "aggregation": {"method": "AllReduse"}},
        "execution": {"precision": "Hal", "deterministic": 1},
    }
    assert sorted(wrong(document)) == sorted(
        [
            "name: 'two words' is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-', a letter or digit "
            "first",
            "epoch: unknown key; did you mean epochs?",
            "batch_size: 0 is not allowed; must be >= 1",
            "seed: 1.0 is not a whole number",
            "model.entrypoint: 'no colon' is not of the form package.module:name",
            "model.kwarg: unknown key; did you mean kwargs?",
            "data.path: 'data.pkl' is not a .safetensors file; other formats can run code",
            "loss.name: 'cros_entropy' is not one of bce_with_logits, cross_entropy, l1, model, "
            "mse, nll, token_cross_entropy; did you mean cross_entropy?",
            "evaluation.metrics[0]: 'acuracy' is not one of accuracy, loss, perplexity, mae, mse, "
            "top5_accuracy; did you mean accuracy?",
            "optimizer.name: 'sdg' is not one of adadelta, adafactor, adagrad, adam, adamax, "
            "adamw, asgd, muon, nadam, radam, rmsprop, rprop, sgd; did you mean sgd?",
            "optimizer.lr: 'fast' is not a number",
            "optimizer.schedule.name: 'cosin' is not one of constant, linear, cosine, step, "
            "multistep, exponential, polynomial, restarts, onecycle, chain, plateau; "
            "did you mean cosine?",
            "strategy.aggregation.method: 'AllReduse' is not one of AllReduce, ParameterServer, "
            "Decentralized; did you mean AllReduce?",
            "execution.precision: 'Hal' is not one of Full, Single, Mixed, Half; "
            "did you mean Half?",
            "execution.deterministic: 1 is not true or false",
        ]
    )


STAGES: dict[str, Any] = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["0"], "target": {"Tag": "any"}}],
    "communication": {"protocol": "Pipeline", "micro_batch_size": 8},
}


def grouped(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"name": "sgd", "lr": 1, "groups": list(groups)}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_size": True}, "batch_size: True is not a whole number"),
        ({"batch_size": "64"}, "batch_size: '64' is not a whole number"),
        ({"seed": -1}, "seed: -1 is not allowed; must be >= 0"),
        ({"retention": 0}, "retention: 0 is not allowed; must be >= 1"),
        ({"epochs": 2**63}, "epochs: 9223372036854775808 is not allowed; must be <= "),
        ({"name": "a" * 65}, "name: "),
        ({"name": "../etc"}, "name: "),
        ({"model": {}}, "model: needs exactly one of entrypoint, graph; has none"),
        ({"model": 3}, "model: 3 is not a mapping of entrypoint, kwargs, graph"),
        ({"data": {"path": "a.safetensors", "kwargs": {"a": 1}}}, "data.kwargs: has a meaning"),
        ({"data": {"inline": "abc"}}, "data.inline: 'abc' is not a SHA-256 digest"),
        ({"loss": {"name": "mse", "entrypoint": "b:c"}}, "loss: needs exactly one of name, entryp"),
        (
            {"loss": {"name": "mse", "weight": "labels"}},
            "loss.weight: belongs to the loss `model` only; a loss of your own may return (mean, ",
        ),
        ({"loss": {"name": "model", "weight": "tokens"}}, "loss.weight: 'tokens' is not one of ro"),
        (
            {"loss": "model", "strategy": STAGES},
            "loss: model is not allowed with strategy ModelParallel: a stage cannot call model(**",
        ),
        (
            {"loss": "seqs.loss"},
            "loss.name: 'seqs.loss' is not one of bce_with_logits, cross_entropy, l1, model, mse, "
            "nll, token_cross_entropy; an entry point is written module:name, did you mean "
            "seqs:loss?",
        ),
        ({"loss": "a:b:c"}, "loss.entrypoint: 'a:b:c' is not of the form package.module:name"),
        ({"optimizer": "sgd"}, "optimizer: 'sgd' is not a mapping of name, entrypoint, lr, "),
        ({"optimizer": {"name": "sgd", "lr": 0}}, "optimizer.lr: 0 is not allowed; must be > 0"),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "kwargs": {"lr": 2}}},
            "optimizer.kwargs.lr: is not a keyword of torch's here",
        ),
        ({"optimizer": {"name": "sgd", "lr": 1, "params": 2}}, "optimizer.params: come from the"),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "nesterov": True, "kwargs": {"nesterov": 1}}},
            "optimizer.nesterov: is also in kwargs",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "schedule": "step"}},
            "optimizer.schedule.step_size_steps: missing; the step schedule needs it",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "schedule": "exponential"}},
            "optimizer.schedule.gamma: missing; the exponential schedule needs it",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "schedule": {"name": "cosine", "power": 2.0}}},
            "optimizer.schedule.power: belongs to the polynomial schedule only",
        ),
        (
            {
                "optimizer": {
                    "name": "sgd",
                    "lr": 1,
                    "schedule": {"name": "multistep", "milestones": [4, 3]},
                }
            },
            "optimizer.schedule.milestones: [4, 3] do not ascend",
        ),
        ({"optimizer": {"name": "sgd", "lr": 1, "schedule": []}}, "optimizer.schedule.parts: mis"),
        ({"model": {"entrypoint": "a:b", "freeze": "enc"}}, "model.freeze: 'enc' is not a list"),
        (grouped({"max_dims": 0, "lr": 0.1}), "optimizer.groups[0].name: missing"),
        (grouped({"name": "a", "lr": 0.1}), "optimizer.groups[0].match: missing; a group needs"),
        (
            grouped({"name": "default", "max_dims": 1}),
            "optimizer.groups[0].name: 'default' is the group of all parameters that are in no",
        ),
        (
            grouped({"name": "a", "max_dims": 1}, {"name": "a", "max_dims": 0}),
            "optimizer.groups[1].name: 'a' is the name of an earlier group",
        ),
        (
            grouped({"name": "a", "max_dims": 1, "clip_norm": 1.0}),
            "optimizer.groups[0].clip_norm: belongs to the optimizer",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "schedule": ["cosine", "linear"]}},
            "optimizer.schedule.parts[0].steps: missing; every part of a chain but the last",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "schedule": [["linear"], "linear"]}},
            "optimizer.schedule.parts[0]: is a chain; a chain holds none",
        ),
        (
            {
                "optimizer": {
                    "name": "sgd",
                    "lr": 1,
                    "schedule": {"name": "chain", "parts": ["linear"], "warmup_steps": 3},
                }
            },
            "optimizer.schedule.warmup_steps: has no meaning in a chain",
        ),
        ({"evaluation": {"every": "often"}}, "evaluation.every: 'often' is not like 1 epoch"),
        ({"evaluation": {"every": "0 steps"}}, "evaluation.every: '0 steps' is not like"),
        ({"evaluation": {"best": "f1"}}, "evaluation.best: 'f1' is not measured; one of loss"),
        (
            {"evaluation": {"metrics": ["task:f1"], "best": "task:f1.0"}},
            "evaluation.best: 'task:f1.0' is an entry of a vector; a mapping gives its values",
        ),
        (
            {"evaluation": {"metrics": ["accuracy"], "best": "accuracy.x"}},
            "evaluation.best: 'accuracy.x' is not measured; one of accuracy, loss",
        ),
        (
            {"evaluation": {"metrics": ["accuracy"], "keep": "task:keep", "max_bytes": 5}},
            "evaluation.keep: is for metrics of your own; evaluation.metrics names none",
        ),
        (
            {"evaluation": {"metrics": ["mse", "mse"]}},
            "evaluation.metrics[1]: 'mse' is in the list already",
        ),
        (
            {"evaluation": {"metrics": ["mse", "acuracy"], "best": "accuracy"}},
            "evaluation.metrics[1]: 'acuracy' is not one of accuracy, loss, perplexity, mae, mse, "
            "top5_accuracy; did you mean accuracy?",
        ),
        ({"loss": "cros_entropy"}, "loss.name: 'cros_entropy' is not one of bce_with_logits, "),
        (
            {"loss": {"name": "cross_entropy", "kwargs": {"weight": [1, 2]}}},
            "loss.kwargs.weight: unknown key; known: label_smoothing",
        ),
        (
            {"optimizer": {"name": "sdg", "lr": 1}},
            "optimizer.name: 'sdg' is not one of adadelta, adafactor, ",
        ),
        ({"evaluation": {"metrics": "accuracy"}}, "evaluation.metrics: 'accuracy' is not a list"),
        ({"strategy": "Local"}, "strategy: 'Local' is not a mapping such as {type: Local}"),
        ({"epochs": None}, "epochs: missing; Local needs epochs or steps"),
        ({"steps": 3}, "steps: epochs is set already; only one of the two may be"),
        ({"strategy": FEDERATED}, "epochs: has no meaning under Federated"),
        ({"strategy": RING}, "strategy.options.all_reduce: ring adds in an order that depends on"),
        ({"partition": {"method": "contiguous"}}, "partition: belongs to Federated only; the"),
        ({"data": {"worker_local": "scans"}}, "data.worker_local: belongs to Federated only"),
        (
            {"recording": {"client_steps": True}},
            "recording.client_steps: belongs to Federated only",
        ),
        ({"evaluation": {"every": "1 round"}}, "evaluation.every: '1 round' is not allowed; Loc"),
        ({"checkpoint": {"every": "2 rounds"}}, "checkpoint.every: '2 rounds' is not allowed"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], expected: str) -> None:
    assert wrong({**MINIMAL, **changes})[0].startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"evaluation": {"every": "1 epoch"}}, "evaluation.every: '1 epoch' is not allowed; Fed"),
        ({"checkpoint": {"every": "9 steps"}}, "checkpoint.every: '9 steps' is not allowed; Fed"),
        ({"steps": 3}, "steps: has no meaning under Federated"),
        (
            {"recording": {"steps": False, "client_steps": True}},
            "recording.client_steps: needs recording.steps",
        ),
        ({"partition": {"method": "dirichlet", "alpha": 0}}, "partition.alpha: 0 is not allowed"),
        ({"partition": {"method": "contiguous", "alpha": 1}}, "partition.alpha: belongs to"),
        (
            {"partition": {"method": "dirichlet", "labels_per_client": 2}},
            "partition.labels_per_client: belongs to method by_label only",
        ),
        (
            {"data": {"worker_local": "scans"}, "partition": {"method": "contiguous"}},
            "partition: worker_local data is divided by where it is",
        ),
    ],
)
def test_federated_jobs_count_in_rounds(changes: dict[str, Any], expected: str) -> None:
    assert wrong({**FEDERATED_JOB, **changes})[0].startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"accumulation": {"micro_batch_size": 8, "steps": 2}},
            "accumulation.steps: micro_batch_size is set already; only one of the two may be",
        ),
        ({"accumulation": {"steps": 0}}, "accumulation.steps: 0 is not allowed; must be >= 1"),
        (
            {"accumulation": {"micro_batch_size": 65}},
            "accumulation.micro_batch_size: 65 rows is more than batch_size, 64",
        ),
        (
            {"accumulation": {"steps": 65}},
            "accumulation.steps: 65 micro-batches is more than batch_size, 64",
        ),
        (
            {"accumulation": {"non_finite": "skip"}},
            "accumulation.non_finite: 'skip' is not one of fail, skip_step",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0}},
            "optimizer.clip_norm: 0 is not allowed; must be > 0",
        ),
        (
            {"strategy": STAGES, "accumulation": {"steps": 2}},
            "accumulation.steps: has no meaning under a Pipeline; its communication.micro_batch_",
        ),
        (
            {"strategy": STAGES, "accumulation": {"micro_batch_size": 4}},
            "accumulation.micro_batch_size: 4 contradicts the Pipeline's communication.micro_ba",
        ),
        (
            {
                "strategy": {
                    "type": "DataParallel",
                    "num_replicas": 2,
                    "aggregation": {"method": "AllReduce"},
                    "options": {"inner": STAGES},
                },
                "accumulation": {"micro_batch_size": 4},
            },
            "accumulation.micro_batch_size: 4 contradicts the Pipeline's communication.micro_ba",
        ),
    ],
)
def test_accumulation_that_cannot_be_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert wrong({**MINIMAL, **changes})[0].startswith(expected)


def test_accumulation_without_a_batch_size_is_told_that_it_is_missing() -> None:
    document = {**MINIMAL, "accumulation": {"steps": 2}}
    del document["batch_size"]
    assert wrong(document) == ["batch_size: missing; for example batch_size: 32"]


def test_accumulation_may_repeat_what_the_pipeline_says() -> None:
    same = {"micro_batch_size": 8, "non_finite": "skip_step"}
    job = JobSpec.parse({**MINIMAL, "strategy": STAGES, "accumulation": same})
    assert job.window.may_skip
    assert JobSpec.from_json(job.canonical_json()) == job
    assert not JobSpec.parse(MINIMAL).window.may_skip


def test_evaluation_is_once_per_epoch_or_round() -> None:
    for document, expected in ((MINIMAL, "1 epoch"), (FEDERATED_JOB, "1 round")):
        job = JobSpec.parse({**document, "evaluation": {"metrics": ["accuracy"]}})
        assert job.evaluation is not None
        assert str(job.evaluation.every) == expected
        assert JobSpec.from_json(job.canonical_json()) == job


def test_a_ring_may_add_where_bits_are_given_up() -> None:
    job = JobSpec.parse({**MINIMAL, "strategy": RING, "execution": {"deterministic": False}})
    assert JobSpec.from_json(job.canonical_json()) == job


def untyped(kind: type) -> Any:
    return kind


def test_a_job_made_in_code_is_checked_in_our_words() -> None:
    with pytest.raises(InvalidInputError, match=r"^lr: -1 is not allowed; must be > 0$"):
        OptimizerSpec(name="sgd", lr=-1)
    # What the fields hold is narrower than what they are made from.
    make_job, make_optimizer = untyped(JobSpec), untyped(OptimizerSpec)
    with pytest.raises(InvalidInputError, match="strategy"):
        make_job(**MINIMAL, strategy="DataParallel")
    job = make_job(
        name="digits",
        model=ModelSpec(entrypoint="examples.digits:build_model"),
        data=DataSpec(entrypoint="examples.digits:load"),
        loss="cross_entropy",
        optimizer=make_optimizer(name="sgd", lr=0.1, momentum=0.9),
        evaluation=untyped(EvaluationSpec)(metrics=["accuracy"]),
        epochs=1,
        batch_size=4,
        strategy=DataParallel(2, AllReduce()),
    )
    assert job.optimizer.kwargs == {"momentum": 0.9}
    with pytest.raises(ValidationError, match="frozen"):
        job.seed = 3


def test_from_json_refuses_what_is_not_a_job() -> None:
    for text in ("", "3", "[]", '{"name":"a","name":"b"}'):
        with pytest.raises(InvalidInputError):
            JobSpec.from_json(text)


def test_partition_of_a_federated_job() -> None:
    document = {**FEDERATED_JOB, "partition": {"method": "by_label", "labels_per_client": 2}}
    assert JobSpec.parse(document).partition == PartitionSpec(
        method="by_label", labels_per_client=2
    )
