"""The settings that go together with a divided optimizer state, and the sentence against each
other."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.checks import BY_ELEMENT
from stratagem.common.job.optimizer import KEYWORDS
from stratagem.common.strategy import fewest_mirrored, partitions_parameters, partitions_state
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED
from tests.gan_jobs import TURNS
from tests.jobs import SGD, document

pytestmark = pytest.mark.core


MUON = {"name": "muon", "lr": 0.1}


def strategy(method: str = "AllReduce", **options: Any) -> dict[str, Any]:
    aggregation = {"method": method}
    if method == "Decentralized":
        aggregation["topology"] = "ring"
    whole = DATA_PARALLEL | {"num_replicas": 4, "aggregation": aggregation}
    return whole | {"options": {"partition_state": "optimizer", **options}}


def parsed(**sections: Any) -> JobSpec:
    return JobSpec.parse(document(**{"strategy": strategy(), **sections}))


FULL = strategy(partition_state="full")
PIPELINE = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0"], "target": {"WorkerId": "a"}},
        {"node_ids": ["1", "2"], "target": {"WorkerId": "b"}},
    ],
    "communication": {"protocol": "Direct"},
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"strategy": strategy("ParameterServer")}, "strategy.options.partition_state: ParameterS"),
        ({"strategy": strategy("Decentralized")}, "strategy.options.partition_state: Decentralize"),
        ({"strategy": strategy(all_reduce="ring")}, "strategy.options.partition_state: ring all-r"),
        ({"strategy": strategy(local_steps=2)}, "strategy.options.partition_state: replicas with"),
        ({"strategy": strategy(inner=PIPELINE)}, "strategy.options.partition_state: ModelParallel"),
        ({"strategy": strategy(partition_state="parameters")}, "strategy.options.partition_state:"),
        ({"strategy": FULL, "weight_average": {}}, "weight_average: is not allowed with strategy."),
        ({"strategy": FULL, "execution": {"mode": "Lazy"}}, "execution.mode: is not allowed with"),
        ({"strategy": FULL, "execution": {"precision": "Half"}}, "execution.precision: is not all"),
        ({"compression": "int8"}, "compression: is not allowed with strategy.options.partition_s"),
        ({"strategy": strategy(partition_state="none", mirror=1)}, "strategy.options.mirror: each"),
        ({"phases": {}}, "phases: is not allowed with strategy.options.partition_state"),
        ({"turns": TURNS, "optimizer": None, "loss": None}, "turns: is not allowed with strategy."),
        (
            {"strategy": {**FEDERATED, "options": {"inner": strategy()}}},
            "strategy.options.inner.options.partition_state: is possible in a strategy of its own",
        ),
        (
            {"optimizer": {"entrypoint": "tests.userland.optimizers:SignMomentum", "lr": 0.1}},
            'optimizer.entrypoint: "tests.userland.optimizers:SignMomentum" is not known to have',
        ),
        (
            {"optimizer": {**SGD, "groups": [{"name": "x", "match": ["*"], "optimizer": MUON}]}},
            'optimizer.groups[0].optimizer.name: "muon" is not known to have the same bits',
        ),
    ],
)
def test_what_contradicts_it_is_refused_with_a_sentence(sections: Any, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parsed(**sections)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_only_optimizers_that_are_known_to_go_by_element_are_allowed(name: str) -> None:
    section = {"optimizer": {"name": name, "lr": 0.1}}
    if name in BY_ELEMENT:
        assert partitions_state(parsed(**section).strategy)
        return
    with pytest.raises(InvalidInputError, match=f'"{name}" is not known to have the same bits'):
        parsed(**section)


def test_only_slices_of_parameters_forbid_what_needs_whole_ones() -> None:
    sections = {"weight_average": {}, "execution": {"precision": "Half"}}
    assert not partitions_parameters(parsed(**sections).strategy)
    full = parsed(strategy=strategy(partition_state="full", mirror=0)).strategy
    assert partitions_state(full)
    assert partitions_parameters(full)
    assert fewest_mirrored(full) is None
    plain = JobSpec.parse(document(strategy={**strategy(), "options": {}}))
    none = JobSpec.parse(document(strategy=strategy(partition_state="none")))
    assert not partitions_state(plain.strategy)
    assert plain == none
    assert "partition_state" not in plain.canonical_json()
    assert JobSpec.from_json(parsed().canonical_json()) == parsed()


@pytest.mark.parametrize("state", ["optimizer", "full"])
@pytest.mark.parametrize(("mirror", "fewest"), [(None, 3), (0, None), (1, 2)])
def test_slices_are_mirrored_from_three_on(
    state: str, mirror: int | None, fewest: int | None
) -> None:
    chosen = parsed(strategy=strategy(partition_state=state, mirror=mirror)).strategy
    assert fewest_mirrored(chosen) == fewest
