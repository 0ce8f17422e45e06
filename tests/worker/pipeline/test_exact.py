"""Any schedule, any split: the bits of the sharded loop with the same micro-batches."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.model.graph import GraphSpec
from stratagem.common.pipeline.schedules import SCHEDULES
from stratagem.worker.pipeline.build import StageAssignment
from tests.every_pair import every_pair, every_value
from tests.jobs import user_data, user_model
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.worker.engine.support import assert_same_bits
from tests.worker.pipeline.graphs import BRANCHES, NESTED, SKIPS, edges, linear
from tests.worker.pipeline.support import ADAM, ALLOWED, SGD, Party, cut, deep_job

DEEP = [str(i) for i in range(8)]


def assert_exact(
    spec: Any, placement: StageAssignment, num_steps: int = 3, timeout_s: float = PATIENCE_S
) -> None:
    party = Party(spec, placement, timeout_s=timeout_s)
    losses = party.train(num_steps)
    size = placement.micro_batch_size or 1000
    expected = sharded_loop(spec, ALLOWED, 1, num_steps, micro_batch_size=size)
    assert losses == expected.losses
    assert_same_bits(party.model(), dict(expected.state))


@pytest.mark.parametrize(
    ("sizes", "schedule", "micro_batch_size", "precision", "optimizer"),
    every_pair(
        [(8,), (3, 5), (1, 4, 3), (2, 2, 1, 3)],
        ["gpipe", "1f1b", "eager", "zero_bubble"],
        [3, None, 2],
        ["Single", "Full"],
        [SGD, ADAM],
    ),
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_splits_and_schedules(
    sizes: tuple[int, ...],
    schedule: str,
    micro_batch_size: int | None,
    precision: str,
    optimizer: dict[str, Any],
) -> None:
    """Dropout, batch norm, in-place nodes; batches of 8, 8 and 6 rows."""
    spec = deep_job(optimizer=optimizer, execution={"precision": precision})
    ranks = tuple(range(len(sizes)))
    assert_exact(spec, StageAssignment(cut(DEEP, *sizes), ranks, micro_batch_size, schedule))


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    every_value([(0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 1, 0), (0, 1, 2, 0)], ["zero_bubble", "1f1b"]),
    ids=str,
)
def test_several_stages_per_rank(ranks: tuple[int, ...], schedule: str) -> None:
    """Interleaved where the number of micro-batches allows it (8 rows), else a list schedule."""
    placement = StageAssignment(cut(DEEP, 2, 2, 2, 2), ranks, 2, schedule)
    assert_exact(deep_job(optimizer=ADAM), placement)


def test_seven_rows_in_micro_batches_of_two() -> None:
    data = user_data("classes", num_rows=14)
    spec = deep_job("InARow", batch_size=7, data=data)
    assert_exact(spec, StageAssignment((("drop", "head"), ("body",)), (0, 1), 2))
    assert_exact(spec, StageAssignment((("drop", "head"), ("body",)), (0, 1), 1))


@pytest.mark.parametrize(
    ("copies", "sizes", "ranks", "optimizer"),
    [
        (2, (4,), (0,), ADAM),
        (2, (2, 2), (0, 1), SGD),
        (3, (2, 2, 3), (0, 1, 2), ADAM),
        (3, (2, 2, 3), (0, 1, 0), SGD),
    ],
)
def test_tied_parameters(
    copies: int, sizes: tuple[int, ...], ranks: tuple[int, ...], optimizer: dict[str, Any]
) -> None:
    """Tokens, with the loss over those that count; two or three stages hold the embedding."""
    names = [str(i) for i in range(sum(sizes))]
    spec = deep_job(
        user_model("tied", copies=copies),
        data=user_data("tokens"),
        loss="token_cross_entropy",
        optimizer=optimizer,
    )
    assert_exact(spec, StageAssignment(cut(names, *sizes), ranks, 3))


@pytest.mark.parametrize(
    ("partitions", "schedule"),
    [
        ((("a", "t", "b", "c", "d", "sum", "e", "all", "head"),), "1f1b"),
        ((("a", "t"), ("b", "c", "d", "sum"), ("e", "all", "head")), "zero_bubble"),
        ((("a", "t", "b"), ("c", "d"), ("sum",), ("e", "all", "head")), "1f1b"),
        ((("all", "head"), ("e", "sum", "d", "c", "b"), ("t", "a")), "zero_bubble"),
        ((("a", "t", "b", "c"), ("d", "sum", "e"), ("all", "head")), "1f1b"),
    ],
    ids=lambda each: each if isinstance(each, str) else "|".join("".join(part) for part in each),
)
def test_skips_that_are_used_by_several_stages(
    partitions: tuple[tuple[str, ...], ...], schedule: str
) -> None:
    placement = StageAssignment(partitions, tuple(range(len(partitions))), 3, schedule)
    assert_exact(deep_job({"graph": SKIPS}, optimizer=ADAM), placement)


@pytest.mark.parametrize(
    "partitions",
    [
        (("a", "norm"), ("left",), ("right",)),
        (("right",), ("left",), ("a", "norm")),
        (("a",), ("norm", "left"), ("right",)),
        (("a", "norm", "right"), ("left",)),
    ],
)
def test_a_backbone_with_two_heads(partitions: tuple[tuple[str, ...], ...]) -> None:
    spec = deep_job({"graph": BRANCHES}, loss="tests.userland.losses:two_heads")
    assert_exact(spec, StageAssignment(partitions, tuple(range(len(partitions))), 4))


@pytest.mark.parametrize(
    "partitions",
    [
        (("start", "enc"), ("pick", "join", "end")),
        (("start", "enc/x"), ("enc/y",), ("enc/m", "pick", "join", "end")),
    ],
)
def test_a_cut_through_a_subgraph(partitions: tuple[tuple[str, ...], ...]) -> None:
    assert_exact(
        deep_job({"graph": NESTED}), StageAssignment(partitions, tuple(range(len(partitions))), 3)
    )


@pytest.mark.parametrize(
    ("model", "sizes", "schedule"),
    [
        ("structured", (1, 1), "1f1b"),
        ("structured", (1, 1), "zero_bubble"),
        ("frozen_start", (1, 2), "1f1b"),
        ("frozen_start", (2, 1), "zero_bubble"),
        ("shared_block", (3, 1), "zero_bubble"),
    ],
)
def test_values_of_all_kinds_cross(model: str, sizes: tuple[int, ...], schedule: str) -> None:
    names = [str(i) for i in range(sum(sizes))]
    assert_exact(
        deep_job(model), StageAssignment(cut(names, *sizes), tuple(range(len(sizes))), 3, schedule)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "eager", "1f1b"])
def test_activation_checkpointing_inside_a_stage(schedule: str) -> None:
    """Several micro-batches are under way when the first of them is computed again."""
    assert_exact(
        deep_job("checkpointed"), StageAssignment((("0",), ("1", "2")), (0, 1), 2, schedule)
    )


@pytest.mark.parametrize(
    ("execution", "has_skips", "schedule"),
    [
        ({"precision": "Mixed"}, True, "1f1b"),
        ({"precision": "Half"}, False, "1f1b"),
        ({"precision": "Mixed", "amp_dtype": "float16"}, False, "zero_bubble"),
        ({"precision": "Half", "amp_dtype": "float16"}, True, "gpipe"),
        ({"gradient": {"Checkpointed": 2}}, True, "zero_bubble"),
        ({"gradient": {"Checkpointed": 3}, "precision": "Half"}, False, "eager"),
    ],
    ids=str,
)
def test_execution_settings(execution: dict[str, Any], has_skips: bool, schedule: str) -> None:
    deep, skips = cut(DEEP, 1, 4, 3), (("a", "t", "b", "c"), ("d", "sum", "e"), ("all", "head"))
    placement = StageAssignment(skips if has_skips else deep, (0, 1, 2), 3, schedule)
    spec = deep_job({"graph": SKIPS} if has_skips else "deep", execution=execution)
    assert_exact(spec, placement)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["Lazy", "Hybrid"])
def test_compiled_nodes(mode: str) -> None:
    """A cut changes no bit, so what is compiled together is a node."""
    strategy = {
        "type": "ModelParallel",
        "partitions": [
            {"node_ids": DEEP[:3], "target": {"WorkerId": "a"}},
            {"node_ids": DEEP[3:], "target": {"WorkerId": "b"}},
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 3},
    }
    spec = deep_job(strategy=strategy, execution={"mode": mode, "precision": "Mixed"})
    placement = StageAssignment(cut(DEEP, 3, 5), (0, 1), 3, "1f1b")
    assert_exact(spec, placement, timeout_s=300.0)  # a compiler on a busy machine


@st.composite
def cut_graphs(draw: st.DrawFn) -> tuple[dict[str, Any], StageAssignment]:
    """Any graph of sums and linear nodes, cut anywhere, on any ranks, in any portions."""
    nodes, pairs = [linear("n0", 12, 4)], []
    for i in range(1, draw(st.integers(2, 7))):
        known = st.sampled_from([node["id"] for node in nodes])
        sources = draw(st.lists(known, min_size=1, max_size=4))
        pairs += [f"{source}>s{i}:{port}" for port, source in enumerate(sources)] + [f"s{i}>n{i}"]
        nodes += [{"id": f"s{i}", "module": "Add"}, linear(f"n{i}", 4, 4)]
    nodes.append(linear("end", 4, 5))
    pairs.append(f"{nodes[-2]['id']}>end")
    graph = {"nodes": nodes, "edges": edges(*pairs), "outputs": ["end"]}
    order = GraphSpec.model_validate(graph).topological_order()
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=4)))
    partitions = tuple(tuple(order[a:b]) for a, b in pairwise([0, *cuts, len(order)]))
    drawn = [draw(st.integers(0, 3)) for _ in partitions]
    ranks = tuple(sorted(set(drawn)).index(rank) for rank in drawn)
    micro_batch_size = draw(st.sampled_from([None, 1, 2, 3]))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    return graph, StageAssignment(partitions, ranks, micro_batch_size, schedule)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(cut_graphs())
def test_any_graph_cut_anywhere(case: tuple[dict[str, Any], StageAssignment]) -> None:
    graph, placement = case
    assert_exact(deep_job({"graph": graph}, optimizer=ADAM), placement)


def test_augmentation_in_the_data_is_drawn_alike_by_first_and_last_stage() -> None:
    spec = deep_job(data=user_data("noisy"))
    assert_exact(spec, StageAssignment(cut(DEEP, 4, 4), (0, 1), 3))
