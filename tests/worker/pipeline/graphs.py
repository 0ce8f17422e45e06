"""Graph models of the pipeline's jobs: skips over stages, branches, and a graph inside a graph."""

from typing import Any


def linear(name: str, width: int = 16, out: int = 16) -> dict[str, Any]:
    kwargs = {"in_features": width, "out_features": out}
    return {"id": name, "module": "Linear", "kwargs": kwargs}


def edges(*pairs: str) -> list[dict[str, Any]]:
    """ "a>b" or "a>b:1" (port)."""
    found = []
    for pair in pairs:
        source, _, rest = pair.partition(">")
        target, _, port = rest.partition(":")
        found.append({"source": source, "target": target, "port": int(port or 0)})
    return found


SKIPS: dict[str, Any] = {
    "nodes": [
        linear("a", 12),
        {"id": "t", "module": "Tanh"},
        linear("b"),
        linear("c"),
        {"id": "d", "module": "Dropout", "kwargs": {"p": 0.25}},
        {"id": "sum", "module": "Add"},
        linear("e"),
        {"id": "all", "module": "Add"},
        linear("head", 16, 5),
    ],
    # t is used five times, by nodes of every stage
    "edges": edges(
        "a>t", "t>b", "b>c", "c>d", "d>sum", "t>sum:1", "t>sum:2", "sum>e", "e>all", "t>all:1",
        "t>all:2", "b>all:3", "all>head",
    ),
}  # fmt: skip


BRANCHES: dict[str, Any] = {
    "nodes": [
        linear("a", 12),
        {"id": "norm", "module": "BatchNorm1d", "kwargs": {"num_features": 16}},
        linear("left", 16, 5),
        linear("right", 16, 3),
    ],
    "edges": edges("a>norm", "norm>left", "norm>right"),
    "outputs": ["left", "right"],
}


NESTED: dict[str, Any] = {
    "nodes": [linear("start", 12), {"id": "join", "module": "Add"}, linear("end", 16, 5)],
    "subgraphs": [
        {
            "id": "enc",
            "graph": {
                "nodes": [linear("x"), linear("y"), {"id": "m", "module": "Multiply"}],
                "edges": edges("x>m", "y>m:1"),
                "outputs": ["m", "x"],
            },
        }
    ],
    "edges": edges("start>enc", "enc>pick", "pick>join", "start>join:1", "join>end"),
}
NESTED["nodes"].append({"id": "pick", "module": "Select", "kwargs": {"index": 0}})
