"""What a worker finds out about the structure of a job's state."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.job import JobSpec, OptimizerSpec, with_fields
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import build_trainer
from stratagem.worker.plans.build import go_on, layout_of, structural
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, job, user_model
from tests.worker.engine.support import CPU

ALLOWED = EntryPoints([ALLOW])


def shaped(**kwargs: Any) -> JobSpec:
    return job(user_model("shaped", **kwargs))


def variant(name: str, value: object) -> pb.Variant:
    return pb.Variant(name=name, fields_json=json.dumps({name: value}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"width": 8}, True),
        ({"depth": 2}, True),
        ({"is_frozen": True}, True),
        ({"is_tied": True}, True),
        ({"has_buffer": True}, True),
        ({"dropout": 0.5}, False),
        ({"activation": "relu"}, False),
        ({"reads_values": True}, False),
        ({"reads_values": True, "width": 8}, True),
    ],
    ids=str,
)
def test_a_layout_is_names_shapes_types_ties_and_what_is_trained(
    changes: dict[str, Any], expected: bool
) -> None:
    assert (layout_of(shaped(), ALLOWED) != layout_of(shaped(**changes), ALLOWED)) is expected


def optimizer(name: str, **kwargs: Any) -> OptimizerSpec:
    return OptimizerSpec(name=name, lr=0.1, kwargs=kwargs)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (optimizer("sgd"), optimizer("sgd", momentum=0.9), True),
        (optimizer("sgd", momentum=0.5), optimizer("sgd", momentum=0.9, nesterov=True), True),
        (optimizer("adam"), optimizer("adam", betas=[0.5, 0.9], weight_decay=0.1), True),
        (optimizer("adam"), optimizer("adam", amsgrad=True), False),
        (optimizer("rmsprop"), optimizer("rmsprop", centered=True), False),
        (optimizer("rmsprop"), optimizer("rmsprop", momentum=0.5), False),
        (optimizer("rmsprop", momentum=0.1), optimizer("rmsprop", momentum=0.5), True),
        (optimizer("sgd", momentum=0.9), optimizer("adam"), False),
    ],
    ids=str,
)
def test_optimizers_go_on_from_each_others_state(
    one: OptimizerSpec, other: OptimizerSpec, expected: bool
) -> None:
    params = [(str(dims), dims) for dims in (0, 1, 2, 4)]
    assert go_on(one, other, params) is expected
    assert go_on(other, one, params) is expected


def test_what_is_structural_is_named_once_and_what_cannot_be_built_is_passed_over() -> None:
    spec = shaped()
    trainer = build_trainer(spec, ALLOWED, device=CPU, fresh=True)
    checks: list[int] = []
    work = SimpleNamespace(
        job=spec,
        entrypoints=ALLOWED,
        control=SimpleNamespace(check=lambda: checks.append(1)),
    )
    asked = [
        variant("model.kwargs.width", 8),
        variant("model.kwargs.width", 16),
        variant("model.kwargs.dropout", 0.9),
        variant("model.kwargs.depth", "many"),
        variant("model.kwargs.unknown", 1),
        variant("model.kwargs.depth", 3),
        variant("optimizer.amsgrad", True),
        variant("optimizer.lr", -1),
        variant("optimizer.nothing", 1),
    ]
    spec = with_fields(spec, {"optimizer": {"name": "adam", "lr": 0.1}})
    work.job = spec
    found = structural(cast(ExecutionContext, work), trainer.model, asked)
    assert found == ["model.kwargs.width", "model.kwargs.depth", "optimizer.amsgrad"]
    assert len(checks) == len(asked)
    assert structural(cast(ExecutionContext, work), trainer.model, []) == []
