"""The job: what it says, what is refused, and that its canonical text gives it back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stratagem.common.base import ids
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
from stratagem.common.job.optimizer import check_optimizer
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Ordinal,
    Scale,
    SearchSpace,
    read_short_form,
)
from stratagem.common.strategy import AllReduce, DataParallel, Federated, Local, PopulationBased
from tests.common.job.documents import MINIMAL
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED
from tests.common.strategy.strategies import EXAMPLES, json_values, training_strategies

pytestmark = pytest.mark.core

RING = DATA_PARALLEL | {"options": {"all_reduce": "ring"}}


def in_rounds(**sections: Any) -> dict[str, Any]:
    return {"epochs": None, "strategy": FEDERATED, **sections}


FEDERATED_JOB = {**MINIMAL, **in_rounds()}


def wrong(document: object) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(document)
    assert "pydantic" not in str(caught.value)
    return [str(each) for each in caught.value.violations]


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
    # And a schedule no key that earlier versions do not know.
    spec = OptimizerSpec.model_validate({"name": "sgd", "lr": 0.1, "schedule": "cosine"})
    text = JobSpec.parse({**MINIMAL, "optimizer": spec.model_dump()}).canonical_json()
    assert (
        '"optimizer":{"name":"sgd","lr":0.1,"kwargs":{},"schedule":{"name":"cosine",'
        '"warmup_steps":0,"final_lr_fraction":0.0,"gamma":0.1}},' in text
    )
    job = JobSpec.parse(MINIMAL)
    assert (job.seed, job.retention, job.steps) == (0, 2, None)
    assert (job.strategy, job.evaluation, job.partition) == (Local(), None, None)
    assert job.execution == ExecutionSpec(precision=None, deterministic=True)
    assert job.checkpoint.every is None
    changed = JobSpec.parse(MINIMAL).canonical_json()
    changed = changed.replace('"cross_entropy"', '"their_loss"').replace('"sgd"', '"their_sgd"')
    with pytest.raises(InvalidInputError, match=r"loss.name: 'their_loss'"):
        JobSpec.from_json(changed)
    with ids.lifted():
        assert JobSpec.from_json(changed).loss.name == "their_loss"


RATES = {"low": 0.01, "high": 1.0, "scale": "log"}
SPACE = SearchSpace((Float("optimizer.lr", 0.01, 1.0, Scale.LOG),), {})
POPULATION: dict[str, Any] = {"steps_per_generation": 3, "evaluation": EvaluationSpec(best="loss")}


def test_a_search_space_in_short_form_is_the_shared_one() -> None:
    short = {
        "optimizer.lr": RATES,
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
    with pytest.raises(InvalidInputError, match="'batch_size' is a value and holds no fields"):
        with_fields(job, {"batch_size.x": 1})


@settings(max_examples=25)
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
        **(POPULATION | {"search_space": SPACE} if isinstance(strategy, PopulationBased) else {}),
        execution=ExecutionSpec(deterministic=False),  # some strategies ask for it
    )
    assert JobSpec.from_json(job.canonical_json()) == job


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"clip": 1.0}, "clip: unknown key; did you mean optimizer.clip_norm or privacy.clip?"),
        ({"clip_norm": 1.0}, "clip_norm: unknown key; did you mean optimizer.clip_norm?"),
        ({"precision": "Mixed"}, "precision: unknown key; did you mean execution.precision?"),
        ({"lr": 0.1}, "lr: unknown key; did you mean optimizer.lr?"),
        ({"optimiser": {}}, "optimiser: unknown key; did you mean optimizer?"),
        ({"epoch": 3}, "epoch: unknown key; did you mean epochs?"),
    ],
)
def test_an_unknown_key_is_led_to_the_section_that_has_it(sections: Any, said: str) -> None:
    assert said in wrong({**MINIMAL, **sections})


def test_an_unknown_keyword_is_led_to_the_key_of_the_optimizer() -> None:
    spec = OptimizerSpec.model_validate({"name": "sgd", "lr": 0.1, "clip": 1.0})
    (violation,) = check_optimizer(spec)
    text = "optimizer.clip: 1.0, but sgd takes no 'clip'; did you mean clip_norm?; it takes damp"
    assert str(violation).startswith(text)


STAGES: dict[str, Any] = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["0"], "target": {"Tag": "any"}}],
    "communication": {"protocol": "Pipeline", "micro_batch_size": 8},
}
ONE = {"name": "a", "max_dims": 1}


def sgd(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "sgd", "lr": 1, **keys}}


def grouped(*groups: dict[str, Any]) -> dict[str, Any]:
    return sgd(groups=list(groups))


def measured(*metrics: str, **keys: Any) -> dict[str, Any]:
    return {"evaluation": {"metrics": list(metrics), **keys}}


def scheduled(**keys: Any) -> dict[str, Any]:
    return sgd(schedule=keys)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_size": True}, "batch_size: True is not a whole number"),
        ({"batch_size": "64"}, "batch_size: '64' is not a whole number"),
        ({"seed": -1}, "seed: -1 is not allowed; must be >= 0"),
        ({"seed": 1.0}, "seed: 1.0 is not a whole number"),
        ({"name": "two words"}, "name: 'two words' is not 1 to 64 of A-Z"),
        ({"model": {"entrypoint": "no colon"}}, "model.entrypoint: 'no colon' is not of the form"),
        ({"model": {"entrypoint": "a:b", "kwarg": {}}}, "model.kwarg: unknown key; did you mean k"),
        ({"data": {"path": "data.pkl"}}, "data.path: 'data.pkl' is not a .safetensors file; other"),
        (sgd(lr="fast"), "optimizer.lr: 'fast' is not a number"),
        (scheduled(name="cosin"), "optimizer.schedule.name: 'cosin' is not one of constant, linea"),
        ({"execution": {"precision": "Hal"}}, "execution.precision: 'Hal' is not one of Full, Si"),
        ({"execution": {"deterministic": 1}}, "execution.deterministic: 1 is not true or false"),
        ({"retention": 0}, "retention: 0 is not allowed; must be >= 1"),
        ({"epochs": 2**63}, "epochs: 9223372036854775808 is not allowed; must be <= "),
        ({"name": "a" * 65}, "name: "),
        ({"name": "../etc"}, "name: "),
        ({"model": {}}, "model: needs exactly one of entrypoint, graph; has none"),
        ({"model": 3}, "model: 3 is not a mapping of entrypoint, kwargs, graph"),
        ({"data": {"path": "a.safetensors", "kwargs": {"a": 1}}}, "data.kwargs: has a meaning"),
        ({"data": {"inline": "abc"}}, "data.inline: 'abc' is not a SHA-256 digest"),
        ({"loss": {"name": "mse", "entrypoint": "b:c"}}, "loss: needs exactly one of name, entryp"),
        ({"loss": {"name": "mse", "weight": "labels"}}, "loss.weight: belongs to the loss `model`"),
        ({"loss": {"name": "model", "weight": "tokens"}}, "loss.weight: 'tokens' is not one of ro"),
        ({"loss": "model", "strategy": STAGES}, "loss: model is not allowed with strategy ModelPa"),
        (
            {"loss": "seqs.loss"},
            "loss.name: 'seqs.loss' is not one of bce_with_logits, cross_entropy, l1, model, mse, "
            "nll, token_cross_entropy; an entry point is written module:name, did you mean seqs:l",
        ),
        ({"loss": "a:b:c"}, "loss.entrypoint: 'a:b:c' is not of the form package.module:name"),
        ({"optimizer": "sgd"}, "optimizer: 'sgd' is not a mapping of name, entrypoint, lr, "),
        ({"optimizer": {"name": "sgd", "lr": 0}}, "optimizer.lr: 0 is not allowed; must be > 0"),
        (sgd(kwargs={"lr": 2}), "optimizer.kwargs.lr: is not a keyword of torch's here"),
        (sgd(params=2), "optimizer.params: come from the"),
        (sgd(nesterov=True, kwargs={"nesterov": 1}), "optimizer.nesterov: is also in kwargs"),
        (sgd(schedule="step"), "optimizer.schedule.step_size_steps: missing; the step schedule"),
        (sgd(schedule="exponential"), "optimizer.schedule.gamma: missing; the exponential schedul"),
        (scheduled(name="cosine", power=2.0), "optimizer.schedule.power: belongs to the polynomia"),
        (scheduled(name="multistep", milestones=[4, 3]), "optimizer.schedule.milestones: [4, 3] d"),
        (sgd(schedule=[]), "optimizer.schedule.parts: mis"),
        ({"model": {"entrypoint": "a:b", "freeze": "enc"}}, "model.freeze: 'enc' is not a list"),
        (grouped({"max_dims": 0, "lr": 0.1}), "optimizer.groups[0].name: missing"),
        (grouped({"name": "a", "lr": 0.1}), "optimizer.groups[0].match: missing; a group needs"),
        (grouped({"name": "default", "max_dims": 1}), "optimizer.groups[0].name: 'default' is the"),
        (grouped(ONE, ONE), "optimizer.groups[1].name: 'a' is the name of an earlier group"),
        (grouped({**ONE, "clip_norm": 1.0}), "optimizer.groups[0].clip_norm: belongs to the optim"),
        (sgd(schedule=["cosine", "linear"]), "optimizer.schedule.parts[0].steps: missing; every"),
        (sgd(schedule=[["linear"], "linear"]), "optimizer.schedule.parts[0]: is a chain; a chain"),
        (scheduled(name="chain", parts=["linear"], warmup_steps=3), "optimizer.schedule.warmup_st"),
        ({"evaluation": {"every": "often"}}, "evaluation.every: 'often' is not like 1 epoch"),
        ({"evaluation": {"every": "0 steps"}}, "evaluation.every: '0 steps' is not like"),
        ({"evaluation": {"best": "f1"}}, "evaluation.best: 'f1' is not measured; one of loss"),
        (measured("task:f1", best="task:f1.0"), "evaluation.best: 'task:f1.0' is an entry of a ve"),
        (measured("accuracy", best="accuracy.x"), "evaluation.best: 'accuracy.x' is not measured"),
        (measured("accuracy", keep="task:keep"), "evaluation.keep: is for metrics of your own"),
        ({"evaluation": {"metrics": ["mse", "mse"]}}, "evaluation.metrics[1]: 'mse' is in the lis"),
        (measured("mse", "acuracy"), "evaluation.metrics[1]: 'acuracy' is not one of accuracy"),
        ({"loss": "cros_entropy"}, "loss.name: 'cros_entropy' is not one of bce_with_logits, "),
        (
            {"loss": {"name": "cross_entropy", "kwargs": {"weight": [1, 2]}}},
            "loss.kwargs.weight: unknown key; known: label_smoothing",
        ),
        ({"optimizer": {"name": "sdg", "lr": 1}}, "optimizer.name: 'sdg' is not one of adadelta"),
        ({"evaluation": {"metrics": "accuracy"}}, "evaluation.metrics: 'accuracy' is not a list"),
        ({"strategy": "Local"}, "strategy: 'Local' is not a mapping such as {type: Local}"),
        ({"epochs": None}, "epochs: missing; Local needs epochs or steps"),
        ({"steps": 3}, "steps: epochs is set already; only one of the two may be"),
        ({"strategy": FEDERATED}, "epochs: has no meaning under Federated"),
        ({"strategy": RING}, "strategy.options.all_reduce: ring adds in an order that depends on"),
        ({"partition": {"method": "contiguous"}}, "partition: belongs to Federated only; the"),
        ({"data": {"worker_local": "scans"}}, "data.worker_local: belongs to Federated only"),
        ({"recording": {"client_steps": True}}, "recording.client_steps: belongs to Federated onl"),
        ({"evaluation": {"every": "1 round"}}, "evaluation.every: '1 round' is not allowed; Loc"),
        ({"checkpoint": {"every": "2 rounds"}}, "checkpoint.every: '2 rounds' is not allowed"),
        (in_rounds(evaluation={"every": "1 epoch"}), "evaluation.every: '1 epoch' is not allowed;"),
        (in_rounds(checkpoint={"every": "9 steps"}), "checkpoint.every: '9 steps' is not allowed;"),
        (in_rounds(steps=3), "steps: has no meaning under Federated"),
        (
            in_rounds(recording={"steps": False, "client_steps": True}),
            "recording.client_steps: needs re",
        ),
        (in_rounds(partition={"method": "dirichlet", "alpha": 0}), "partition.alpha: 0 is not all"),
        (in_rounds(partition={"method": "contiguous", "alpha": 1}), "partition.alpha: belongs to"),
        (
            in_rounds(partition={"method": "dirichlet", "labels_per_client": 2}),
            "partition.labels_per_client: belongs to method by_label only",
        ),
        (
            in_rounds(data={"worker_local": "scans"}, partition={"method": "contiguous"}),
            "partition: worker_local data is divided by where it is",
        ),
        ({"accumulation": {"micro_batch_size": 8, "steps": 2}}, "accumulation.steps: micro_batch_"),
        ({"accumulation": {"steps": 0}}, "accumulation.steps: 0 is not allowed; must be >= 1"),
        ({"accumulation": {"micro_batch_size": 65}}, "accumulation.micro_batch_size: 65 rows is m"),
        ({"accumulation": {"steps": 65}}, "accumulation.steps: 65 micro-batches is more than batc"),
        ({"accumulation": {"non_finite": "skip"}}, "accumulation.non_finite: 'skip' is not one of"),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0}}, "optimizer.clip_norm: 0 is no"),
        ({"strategy": STAGES, "accumulation": {"steps": 2}}, "accumulation.steps: has no meaning"),
        (
            {"strategy": STAGES, "accumulation": {"micro_batch_size": 4}},
            "accumulation.micro_batch_size: 4 contradicts the Pipeline's communication.micro_ba",
        ),
        (
            {
                "strategy": DATA_PARALLEL | {"options": {"inner": STAGES}},
                "accumulation": {"micro_batch_size": 4},
            },
            "accumulation.micro_batch_size: 4 contradicts the P",
        ),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], expected: str) -> None:
    assert wrong({**MINIMAL, **changes})[0].startswith(expected)


def test_accumulation_needs_a_batch_size_and_may_repeat_what_the_pipeline_says() -> None:
    document = {**MINIMAL, "accumulation": {"steps": 2}}
    del document["batch_size"]
    assert wrong(document) == ["batch_size: missing; for example batch_size: 32"]
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
    partition = {"method": "by_label", "labels_per_client": 2}
    parsed = JobSpec.parse({**FEDERATED_JOB, "partition": partition}).partition
    assert parsed == PartitionSpec(method="by_label", labels_per_client=2)
    # A ring may add where bits are given up.
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
    for text in ("", "3", "[]", '{"name":"a","name":"b"}'):
        with pytest.raises(InvalidInputError):
            JobSpec.from_json(text)
