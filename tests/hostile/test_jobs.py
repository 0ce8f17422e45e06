"""Jobs as large and as wrong as a message can carry are judged quickly, and not one by one."""

import json
import time
from typing import Any

import pytest

from stratagem.common.base.errors import MAX_VIOLATIONS, InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import MAX_VALUES, load_json
from stratagem.common.strategy.topology import MAX_LINKS, graph_of
from tests.jobs import job
from tests.patience import AT_ONCE_S

pytestmark = pytest.mark.core


def document(**changes: Any) -> str:
    return json.dumps({**json.loads(job().canonical_json()), **changes})


def graph(nodes: list[Any], edges: list[Any]) -> dict[str, Any]:
    return {"graph": {"nodes": nodes, "edges": edges}}


def nodes(count: int) -> list[Any]:
    return [{"id": f"n{i}", "module": "Linear"} for i in range(count)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {
                "model": graph(
                    nodes(2000), [{"source": "x", "target": f"y{i}"} for i in range(3000)]
                )
            },
            "is not a node of this graph",
        ),
        ({"model": graph([{"id": "a", "module": "Linear"}] * 9000, [])}, "is taken already"),
        ({f"key{i}": 0 for i in range(10_000)}, "unknown key"),
        (
            {"evaluation": {"split": "test", "metrics": [f"m{i}" for i in range(30_000)]}},
            "at most 64 items",
        ),
        ({"model": {"entrypoint": "a:b", "kwargs": {"k": [0] * MAX_VALUES}}}, "more than 65536"),
    ],
    ids=["ends", "ids", "keys", "metrics", "values"],
)
def test_a_large_mistake_is_found_quickly(changes: dict[str, Any], match: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidInputError, match=match) as caught:
        JobSpec.from_json(document(**changes))
    assert time.monotonic() - began < AT_ONCE_S
    assert len(caught.value.violations) <= MAX_VIOLATIONS
    assert len(str(caught.value)) < 100_000


def test_as_many_values_as_allowed_are_read() -> None:
    text = json.dumps([0] * (MAX_VALUES - 1))
    assert len(load_json(text)) == MAX_VALUES - 1  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="job: has more than 65536 values"):
        load_json(json.dumps([[0]] * (MAX_VALUES // 2)), "job")


def test_what_is_wrong_deep_inside_is_named_from_outside() -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_json('{"a": [0, {"b": 1e999}]}', "job")
    assert str(caught.value) == "job.a[1].b: inf is not a finite number"


@pytest.mark.parametrize("topology", ["complete", "random:900"])
def test_dense_graphs_have_an_end(topology: str) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_LINKS}"):
        graph_of(topology, 1000, 0)
    assert len(graph_of("complete", 700, 0)) == 700


def test_a_job_is_read_once() -> None:
    text = document()
    assert JobSpec.from_json(text) is JobSpec.from_json(text)
