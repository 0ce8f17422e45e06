"""Partitions as stages, programs, boundaries and tags."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.model.graph import GraphSpec
from stratagem.common.model.program import chain, flatten
from stratagem.common.model.stages import plan_stages
from stratagem.common.pipeline.schedules import MAX_TAG, base_of, control_tag, tag_of
from tests.worker.pipeline.graphs import BRANCHES, NESTED, SKIPS

pytestmark = pytest.mark.core

CHAIN = chain(["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("partitions", "field", "reason"),
    [
        ("", "partitions", "must not be empty"),
        ("abcd|", "partitions[1].node_ids", "must not be empty"),
        ("ab|cde", "partitions[1].node_ids[2]", "'e' is no node of the model; known are: a, b, c"),
        ("ab|bcd", "partitions[1].node_ids[0]", "node 'b' is claimed already by partitions[0]"),
        ("ab|d", "partitions", "'c': claimed by no partition; every node must be"),
        ("ac|bd", "partitions", "interleaved: partitions[0] needs partitions[1] needs partitio"),
    ],
)
def test_what_does_not_tile_is_refused(partitions: str, field: str, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan_stages(CHAIN, [list(each) for each in partitions.split("|")] if partitions else [])
    (violation,) = caught.value.violations
    assert violation.field == field
    assert reason in violation.message


def test_stages_follow_the_model_whatever_the_declaration() -> None:
    plan = plan_stages(CHAIN, [["d"], ["b", "a"], ["c"]])
    assert [stage.nodes for stage in plan.stages] == [("a", "b"), ("c",), ("d",)]
    assert [stage.partition for stage in plan.stages] == [1, 2, 0]
    assert [stage.reads_input for stage in plan.stages] == [True, False, False]
    assert [(b.number, b.source, b.target) for b in plan.boundaries] == [(0, 0, 1), (1, 1, 2)]
    assert plan.dependencies() == ((), (0,), (1,))
    with pytest.raises(InvalidInputError) as caught:
        plan_stages(CHAIN, [["a", "x"], ["a"], []])
    assert len(caught.value.violations) == 4, "all mistakes at once"


def test_skips_have_boundaries_of_their_own_and_all_heads_end_in_the_last_stage() -> None:
    program = flatten(GraphSpec.model_validate(SKIPS))
    plan = plan_stages(program, [["a", "t", "b"], ["c", "d"], ["sum", "e"], ["all", "head"]])
    found = {(b.source, b.target): b for b in plan.boundaries}
    assert {pair: b.number for pair, b in found.items()} == {
        (0, 1): 0, (1, 2): 1, (2, 3): 2, (0, 2): 3, (0, 3): 4
    }  # fmt: skip
    assert program.num_uses["t"] == 5
    assert found[0, 2].uses == {"t": (1, 2)}
    assert found[0, 3].uses == {"t": (3, 4), "b": (1,)}
    assert plan.num_boundaries == 5
    with pytest.raises(InvalidInputError, match=r"interleaved"):
        plan_stages(program, [["a", "t", "e"], ["b", "c", "d", "sum"], ["all", "head"]])
    program = flatten(GraphSpec.model_validate(BRANCHES))
    plan = plan_stages(program, [["left"], ["right"], ["a", "norm"]])
    assert [stage.nodes for stage in plan.stages] == [("a", "norm"), ("left",), ("right",)]
    assert plan.dependencies() == ((), (0,), (0, 1))


def test_subgraphs_are_claimed_whole_or_by_path() -> None:
    program = flatten(GraphSpec.model_validate(NESTED))
    assert [call.node for call in program.calls] == [
        "start", "enc/x", "enc/y", "enc/m", "pick", "join", "end"
    ]  # fmt: skip
    rest = ["pick", "join", "end"]
    whole = plan_stages(program, [["start"], ["enc"], rest])
    assert whole.stages[1].nodes == ("enc/x", "enc/y", "enc/m")
    parts = plan_stages(program, [["start", "enc/x"], ["enc/y", "enc/m", *rest]])
    assert parts.stages[0].nodes == ("start", "enc/x")
    with pytest.raises(InvalidInputError, match=r"'enc/x' is claimed already"):
        plan_stages(program, [["start", "enc"], ["enc/x", *rest]])


def test_a_subgraph_with_the_wrong_number_of_inputs_is_refused() -> None:
    inner = {"nodes": [{"id": n, "module": "Identity"} for n in "xy"]}
    outer = {
        "nodes": [{"id": n, "module": "Identity"} for n in "abc"],
        "subgraphs": [{"id": "two", "graph": inner}],
        "edges": [{"source": n, "target": "two", "port": i} for i, n in enumerate("abc")],
    }
    with pytest.raises(InvalidInputError, match=r"two has 2 inputs, 3 were given"):
        flatten(GraphSpec.model_validate(outer))


@settings(max_examples=40)
@given(st.integers(1, 12), st.data())
def test_any_cut_of_a_chain_is_a_row_of_stages(num_nodes: int, data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(num_nodes)]
    cuts = data.draw(st.sets(st.integers(1, num_nodes - 1))) if num_nodes > 1 else set()
    pieces = [names[a:b] for a, b in pairwise([0, *sorted(cuts), num_nodes])]
    shuffled = data.draw(st.permutations(pieces))
    plan = plan_stages(chain(names), shuffled)
    assert [list(stage.nodes) for stage in plan.stages] == pieces
    assert [b.number for b in plan.boundaries] == list(range(len(pieces) - 1))


def test_tags_are_those_of_the_formula_and_distinct() -> None:
    for micro_batch, forward, backward in [(0, 0, 1), (1, 2, 3), (3, 6, 7)]:
        assert tag_of(0, micro_batch, backward=False) == forward
        assert tag_of(0, micro_batch, backward=True) == backward
        assert tag_of(100, micro_batch, backward=True) == 100 + backward
    assert base_of(3, 8) == 48
    for num_boundaries, count in ((1, 1), (1, 50), (7, 3), (20, 1), (20, 50)):
        tags = [
            tag_of(base_of(boundary, count), micro_batch, backward=backward)
            for boundary in range(num_boundaries)
            for micro_batch in range(count)
            for backward in (False, True)
        ]
        tags += [control_tag(num_boundaries, count, number) for number in range(3)]
        assert len(set(tags)) == len(tags)


def test_overflows_are_told_apart_and_negative_numbers_have_no_tag() -> None:
    with pytest.raises(LimitError, match=r"forward offset of micro-batch .* beyond a 64-bit word"):
        tag_of(0, 2**63, backward=False)
    with pytest.raises(LimitError, match=r"backward offset of micro-batch 2147483648 is beyond 32"):
        tag_of(0, 2**31, backward=True)
    with pytest.raises(LimitError, match=r"base 4294967295 .* micro-batch 0 is beyond 32 bits"):
        tag_of(MAX_TAG, 0, backward=True)
    assert tag_of(MAX_TAG, 0, backward=False) == MAX_TAG
    assert control_tag(2**30 - 1, 2, 3) == MAX_TAG
    with pytest.raises(LimitError, match=r"leave no number"):
        control_tag(2**30, 2, 0)
    # Its tag would be another message's.
    calls: dict[str, Callable[[], int]] = {
        "base": lambda: tag_of(-1, 0, backward=False),
        "micro_batch": lambda: tag_of(4, -1, backward=True),
        "boundary": lambda: base_of(-1, 8),
        "num_micro_batches": lambda: base_of(1, -8),
        "number": lambda: control_tag(1, 8, -1),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInputError, match=f"tag.{name}: -[0-9]+ is below 0"):
            call()
