"""Job files in three formats, and overrides from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, check_optimizer, load_job, parse_yaml, with_fields
from stratagem.common.strategy import Federated

pytestmark = pytest.mark.core

YAML = """
name: digits
model: {entrypoint: "examples.digits:build_model", kwargs: {hidden: 64}}
data: {entrypoint: "examples.digits:load"}
loss: cross_entropy
optimizer: {name: sgd, lr: 1e-1, momentum: 0.9}
epochs: 5
batch_size: 64
strategy: {type: DataParallel, num_replicas: 2, aggregation: {method: AllReduce}}
"""
TOML = """
name = "digits"
loss = "cross_entropy"
epochs = 5
batch_size = 64
data.entrypoint = "examples.digits:load"
[model]
entrypoint = "examples.digits:build_model"
kwargs = {hidden = 64}
[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
[strategy]
type = "DataParallel"
num_replicas = 2
aggregation = {method = "AllReduce"}
"""
FEDERATED = (
    "strategy={type: Federated, num_clients: 2, rounds: 3, aggregation: {method: FedAvg}, "
    "client_selection: {method: All}}"
)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(YAML)
    return path


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_three_formats_say_the_same(tmp_path: Path, job_file: Path) -> None:
    job = load_job(job_file)
    assert job.optimizer.lr == 0.1
    assert load_job(written(tmp_path, "job.toml", TOML)) == job
    assert load_job(str(written(tmp_path, "job.json", job.canonical_json()))) == job
    assert load_job(written(tmp_path, "JOB.YML", YAML)) == job


def test_overrides_set_nested_values_of_every_kind(job_file: Path) -> None:
    given = ["optimizer.lr=1e-3", "optimizer.schedule.name=cosine", "model.kwargs.layers=[1, 2]"]
    given += ["execution.precision=Full", "epochs=null", "steps=10", "name=a-b"]
    job = load_job(job_file, [*given, "strategy.num_replicas=3"])
    usual = load_job(job_file, ["retention=null", "execution=null", "model.kwargs.layers=null"])
    assert usual.retention == load_job(job_file).retention
    assert usual.execution == load_job(job_file).execution
    assert usual.model.kwargs == {"hidden": 64, "layers": None}
    with pytest.raises(InvalidInputError, match="batch_size: missing"):
        load_job(job_file, ["batch_size=null"])
    assert (job.optimizer.lr, job.steps, job.epochs, job.name) == (1e-3, 10, None, "a-b")
    assert job.model.kwargs == {"hidden": 64, "layers": [1, 2]}
    assert job.optimizer.schedule is not None
    federated = load_job(job_file, [FEDERATED, "epochs=", "strategy.rounds=9"])
    assert isinstance(federated.strategy, Federated)
    assert federated.strategy.rounds == 9


def test_overrides_reach_into_sections_that_are_bare_text(job_file: Path) -> None:
    short = ["code=folder", "loss=cross_entropy", "optimizer.schedule=cosine", "data.order=shuffle"]
    into = ["code.exclude=[notes/]", "loss.kwargs.label_smoothing=0.1"]
    into += ["optimizer.schedule.warmup_steps=2", "data.order.by=sequential"]
    job = load_job(job_file, [*short, *into])
    assert job.code is not None
    assert (job.code.path, job.code.exclude) == ("folder", ("notes/",))
    assert job.loss is not None
    assert job.loss.kwargs == {"label_smoothing": 0.1}
    schedule = job.optimizer.schedule
    assert schedule is not None
    assert (schedule.name, schedule.warmup_steps) == ("cosine", 2)
    entrypoint = load_job(job_file, ["loss=task:loss", "loss.kwargs.weight=2"]).loss
    assert entrypoint is not None
    assert entrypoint.entrypoint == "task:loss"


GROUPS = """optimizer.groups=[{name: head, match: ["*.bias"]}, {name: rest, max_dims: 1}]"""


def test_overrides_reach_into_lists_by_place_and_by_name(job_file: Path) -> None:
    into = ["optimizer.groups.1.lr=0.5", "optimizer.groups.head.lr=0.25", "model.kwargs.a.0=7"]
    job = load_job(job_file, [GROUPS, "model.kwargs.a=[1, 2]", *into])
    assert [group.lr for group in job.optimizer.groups or ()] == [0.25, 0.5]
    assert list(job.model.kwargs["a"]) == [7, 2]
    assert with_fields(job, {"optimizer.groups.0.lr": 0.75}).optimizer.groups[0].lr == 0.75  # type: ignore[index]
    items = "optimizer.groups has no item '{}'; its items are 0 to 1, named head, rest"
    with pytest.raises(InvalidInputError) as caught:
        load_job(job_file, [GROUPS, "optimizer.groups.2.lr=0.5"])
    assert str(caught.value) == f"override 'optimizer.groups.2.lr=0.5': {items.format('2')}"
    with pytest.raises(InvalidInputError, match=items.format("tail")):
        with_fields(job, {"optimizer.groups.tail.lr": 0.5})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.momentum=high", "optimizer.momentum: 'high' is not a number"),
        ("optimizer.nesterov=soon", "optimizer.nesterov: 'soon' is not true or false"),
        ("optimizer={name: Adam, lr: 1, betas: 0.9}", "optimizer.betas: 0.9 is not a list of 2 "),
        ("optimizer={name: adafactor, lr: 1, eps: [null, x]}", "optimizer.eps: [0, 'x'] is not a "),
        ("optimizer.groups=[{name: a, max_dims: 1, momentum: x}]", "optimizer.groups[0].momentum"),
    ],
)
def test_wrong_values_of_optimizers_are_named(job_file: Path, override: str, expected: str) -> None:
    job = load_job(job_file, [override])
    (violation,) = check_optimizer(job.optimizer)
    assert str(violation).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs", "override 'epochs' is not of the form a.b=value"),
        ("a..b=1", "override 'a..b=1' is not of the form a.b=value"),
        ("=1", "override '=1' is not of the form a.b=value"),
        ("name.x=3", "override 'name.x=3': name is 'digits', neither a mapping"),
        ("epochs=[1", "override 'epochs=[1': not valid YAML: line 1, column 3"),
        ("seed=.nan", "override 'seed=.nan': nan is not a finite number"),
        ("optimizer.lr=fast", "optimizer.lr: 'fast' is not a number"),
        ("epoch=1", "epoch: unknown key; did you mean epochs?"),
    ],
)
def test_wrong_overrides_are_named(job_file: Path, override: str, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_job(job_file, [override])
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: 1\nb: 2\na: 3", "not valid YAML: line 3, column 1: duplicate key 'a'"),
        ("a.yaml", "a: [1", "not valid YAML: line 1, column 6"),
        ("a.yaml", "a: !!python/object/apply:os.system ['x']", "not valid YAML: line 1, column 4"),
        ("a.yaml", "a: &x [*x]", "not valid YAML"),
        ("a.yaml", "a: &x {b: *x}", "not valid YAML"),
        ("a.yaml", "1: 2", "the key 1 is not text"),
        ("a.yaml", "a: \x07", "not valid YAML"),
        ("a.yaml", "a: 1\n---\nb: 2", "not valid YAML: line 2"),
        ("a.yaml", "- 1", "not a mapping of name, model, data"),
        ("a.yaml", "", "not a mapping of name, model, data"),
        ("a.toml", "a = 1\na = 2", "not valid TOML: "),
        ("a.toml", "a = 2024-01-01", "a: datetime.date(2024, 1, 1) (date) has no JSON form"),
        ("a.json", '{"a": 1, "a": 2}', "a: duplicate key"),
        ("a.json", '{"a": 1,}', "not valid JSON: "),
        ("a.ini", "a=1", "'.ini' is not one of .yaml, .yml, .toml, .json"),
        ("a", "a=1", "'no suffix' is not one of"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(InvalidInputError) as caught:
        load_job(path)
    assert str(caught.value).startswith(f"{path}: {expected}")
    assert not caught.value.violations  # of which each would be told without the file


def test_yaml_scalars_are_those_of_version_1_2() -> None:
    same = ("off", "no", "1:30", "2024-01-01", "1_000")
    table: dict[str, Any] = {
        "1e-3": 1e-3,
        "-.5": -0.5,
        "+1.5E3": 1500.0,
        "1.": 1.0,
        "010": 10,
        "0x1F": 31,
        "0o17": 15,
        "-3": -3,
        "true": True,
        "~": None,
        "": None,
        '""': "",
        "[a, ]": ["a"],
        **{text: text for text in same},
        "{a: , b: null}": {"a": None, "b": None},
        "{x: &p {a: 1}, y: {<<: *p, b: 3}}": {"x": {"a": 1}, "y": {"a": 1, "b": 3}},
        "{x: &p {b: 1}, y: {<<: *p, b: 3}}": {"x": {"b": 1}, "y": {"b": 3}},
    }
    for text, value in table.items():
        assert json.dumps(parse_yaml(text)) == json.dumps(value), text


def test_a_file_names_every_wrong_field_or_that_it_is_none(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(YAML.replace("lr: 1e-1", "lr: -1").replace("AllReduce", "AllReduse"))
    with pytest.raises(InvalidInputError) as caught:
        load_job(job_file)
    fields = {each.field for each in caught.value.violations}
    assert fields == {"optimizer.lr", "strategy.aggregation.method"}
    assert isinstance(load_job(job_file, ["optimizer.lr=1", "strategy={type: Local}"]), JobSpec)
    with pytest.raises(InvalidInputError, match="No such file"):
        load_job(tmp_path / "absent.yaml")
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        load_job(tmp_path / "a.yaml")
