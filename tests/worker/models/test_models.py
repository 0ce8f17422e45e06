"""Models from graphs and factories."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import GraphSpec
from stratagem.worker.models.build import build_model, graph_module
from tests.jobs import job
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, model_of, train, trainer_of

CHAIN = {
    "nodes": [
        {"id": "0", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 16}},
        {"id": "1", "module": "Tanh"},
        {"id": "2", "module": "Linear", "kwargs": {"in_features": 16, "out_features": 5}},
    ],
    "edges": [{"source": "0", "target": "1"}, {"source": "1", "target": "2"}],
}


def graph(document: dict[str, Any]) -> nn.Module:
    return graph_module(GraphSpec.model_validate(document))


def test_chain_equals_sequential_to_the_bit() -> None:
    chain, sequential = trainer_of(job({"graph": CHAIN})), trainer_of(job("mlp"))
    assert train(chain, 2, 5) == train(sequential, 2, 5)
    assert_same_bits(model_of(chain), model_of(sequential))


def test_branches_ports_subgraphs_and_frozen_nodes() -> None:
    linear = {"in_features": 4, "out_features": 4}
    document = {
        "nodes": [
            {"id": "left", "module": "Linear", "kwargs": linear},
            {"id": "right", "module": "Linear", "kwargs": linear, "trainable": False},
            {"id": "both", "module": "Concat"},
            {"id": "sum", "module": "Add"},
        ],
        "subgraphs": [
            {
                "id": "head",
                "graph": {
                    "nodes": [
                        {"id": "fc", "module": "Linear", "kwargs": linear | {"in_features": 8}}
                    ]
                },
            }
        ],
        "edges": [
            {"source": "left", "target": "both", "port": 1},
            {"source": "right", "target": "both", "port": 0},
            {"source": "both", "target": "head"},
            {"source": "head", "target": "sum"},
            {"source": "left", "target": "sum", "port": 1},
        ],
    }
    model = graph(document)
    names = {name for name, _ in model.named_parameters()}
    assert {"left.weight", "right.bias", "head.fc.weight"} <= names
    assert not model.get_parameter("right.weight").requires_grad
    x = torch.rand(3, 4)
    left, right = model.get_submodule("left")(x), model.get_submodule("right")(x)
    expected = model.get_submodule("head.fc")(torch.cat([right, left], -1)) + left
    assert torch.equal(model(x), expected)


def test_several_inputs_and_outputs_and_modules_that_take_more_than_a_tensor() -> None:
    document = {
        "nodes": [
            *({"id": name, "module": "Identity"} for name in ("a", "b")),
            {"id": "product", "module": "Multiply"},
        ],
        "edges": [
            {"source": "a", "target": "product"},
            {"source": "b", "target": "product", "port": 1},
        ],
    }
    model = graph({**document, "outputs": ["product", "a"]})
    product, a = model((torch.tensor([2.0]), torch.tensor([3.0])))
    assert (product.item(), a.item()) == (6.0, 2.0)
    with pytest.raises(ValueError, match="2 inputs, 3 were given"):
        model((torch.zeros(1),) * 3)
    names = ("rnn", "out", "mean", "swap")
    nodes = [
        {"id": "rnn", "module": "LSTM", "kwargs": {"input_size": 3, "hidden_size": 2}},
        {"id": "out", "module": "Select", "kwargs": {"index": 0}},
        {"id": "mean", "module": "Mean", "kwargs": {"dim": 0}},
        {"id": "swap", "module": "Permute", "kwargs": {"dims": [1, 0]}},
    ]
    edges = [{"source": one, "target": other} for one, other in pairwise(names)]
    assert graph({"nodes": nodes, "edges": edges})(torch.rand(7, 4, 3)).shape == (2, 4)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"id": "a", "module": "Linaer"}, "did you mean Linear"),
        ({"id": "a", "module": "Sequential"}, "is not one of"),
        ({"id": "a", "module": "Linear", "kwargs": {"in_feature": 3}}, "did you mean"),
        ({"id": "a", "module": "Linear", "kwargs": {"in_features": 3}}, "Linear: .*out_features"),
        ({"id": "a", "module": "Linear", "kwargs": {"device": "cuda"}}, "unknown key"),
        ({"id": "a", "module": "LSTM", "kwargs": {"banana": 3}}, "banana"),
        ({"id": "forward", "module": "ReLU"}, "cannot be the id"),
        ({"id": "training", "module": "ReLU"}, "cannot be the id"),
        ({"id": "_program", "module": "ReLU"}, "cannot be the id"),
    ],
)
def test_wrong_nodes_are_refused(node: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        graph({"nodes": [node]})


def test_factories() -> None:
    with pytest.raises(UserCodeError, match="KeyError: 'no such layer'") as caught:
        trainer_of(job("acting_models:broken_model"))
    assert caught.value.activity == "building the model"
    with pytest.raises(InvalidInputError, match="returned a dict"):
        trainer_of(job({"entrypoint": "tests.userland.data:classes"}))
    with pytest.raises(InvalidInputError, match=r"model.kwargs.width: 3, but .* it takes hidden"):
        trainer_of(job({"entrypoint": "tests.userland.models:mlp", "kwargs": {"width": 3}}))
    model = build_model(job(execution={"precision": "Full"}), ALLOWED, device=CPU, fresh=False)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert not any(param.is_meta for param in model.parameters())


def test_a_sparse_buffer_is_refused_where_it_would_be_part_of_the_state() -> None:
    wanted = {"entrypoint": "tests.userland.models:with_sparse_buffer"}
    with pytest.raises(InvalidInputError) as refused:
        trainer_of(job({**wanted, "kwargs": {"persistent": True}}))
    assert str(refused.value) == (
        'model: state_dict()["links"] is a tensor of layout sparse_coo; allowed is strided, which '
        "`to_dense()` makes; a buffer that is built anew with the model can be registered with "
        "`persistent=False`"
    )
    allowed = job({**wanted, "kwargs": {"persistent": False}})
    model = build_model(allowed, ALLOWED, device=CPU, fresh=True)
    assert "links" not in model.state_dict()
    assert torch.equal(model.get_buffer("links").to_dense(), torch.eye(3))


@pytest.mark.parametrize(("mark", "is_empty"), [(True, True), ("row", True), ([1], False)])
def test_a_parameter_with_a_plain_attribute_is_built_with_it(mark: Any, is_empty: bool) -> None:
    devices: list[torch.device] = []
    saw = {"devices": devices, "mark": mark}
    spec = job({"entrypoint": "tests.userland.odd_models:marked"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.userland.odd_models.MARKS", saw)
        model = build_model(spec, ALLOWED, device=CPU, fresh=False)
    assert [device.type for device in devices] == (["meta"] if is_empty else ["meta", "cpu"])
    assert vars(model.get_parameter("0.weight")) == {"is_tp": mark}
