"""One answer has all that is wrong with a job, in its order, and says what to write."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.sdk import torch_process
from stratagem.common.base.errors import InvalidInputError, UnavailableError, Violation
from stratagem.common.job import JobSpec, load_job
from stratagem.common.job.files import parse_yaml
from stratagem.common.observe.findings import Level
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_calls import objections_to
from tests.common.job.documents import MINIMAL

pytestmark = pytest.mark.core


def wrong(document: dict[str, Any]) -> list[Violation]:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(document)
    return list(caught.value.violations)


def test_fields_sections_strategies_and_what_they_say_together_are_told_at_once() -> None:
    document = {
        **MINIMAL,  # with epochs, which a federation does not count in
        "name": "two words",
        "data": {"path": "rows.safetensors", "collate": "m:f"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentun": 0.9, "schedule": "step"},
        "strategy": {
            "type": "Federated",
            "num_clients": 4,
            "rounds": 3,
            "aggregation": {"method": "FedProx"},
            "options": {
                "quorum": 9,
                "q": -1,
                "control": "scaffold",
                "inner": {"type": "DataParallel", "num_replicas": 2, "options": {"outer_bits": 8}},
            },
        },
        "evaluation": {"every": "3 steps", "metrics": ["acuracy"], "keep": "m:f"},
        "partition": {"method": "iid", "client": 3},
        "weight_averge": {"kind": "ema"},
        "privacy": {"clip": {"norm": 1.0}, "target": {"delta": 1e-5}, "unit": "row"},
    }
    options = ("quorum", "q", "control", "inner", "inner.options.outer_bits", "inner.aggregation")
    assert [each.field for each in wrong(document)] == [
        *("name", "data.collate", "optimizer.momentun", "optimizer.schedule.step_size_steps"),
        *("epochs", "strategy.aggregation.method", "strategy.aggregation.mu"),
        *(f"strategy.options.{name}" for name in options),
        *("strategy.client_selection", "evaluation.every", "evaluation.metrics[0]"),
        *("partition.method", "partition.client", "weight_averge"),
        *("privacy.target.epsilon", "privacy.noise_multiplier"),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epochs": None, "epoch": 3}, ["epoch"]),
        ({"data": {"entrypont": "m:f"}}, ["data.entrypont"]),
        ({"execution": {"gradient": "Non"}}, ["execution.gradient"]),
        ({"strategy": {"type": "Federate"}}, ["strategy.type"]),
        ({"evaluation": 3, "weight_average": {}}, ["evaluation"]),
    ],
)
def test_what_only_follows_from_another_fault_is_not_told(changes: Any, expected: Any) -> None:
    assert [each.field for each in wrong({**MINIMAL, **changes})] == expected


RIGHT_ALONE = {
    **MINIMAL,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentun": 0.9},
    "batch_size": 4,
    "strategy": {
        "type": "DataParallel",
        "num_replicas": 6,
        "aggregation": {"method": "Decentralized", "topology": "hypercube"},
    },
}
"""A job whose sections go together, and that its strategy cannot train."""


@pytest.mark.parametrize("beside", [{}, {"retention": 0}], ids=["valid", "invalid"])
def test_check_the_file_and_the_coordinator_say_the_same(
    beside: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch(*_args: Any, **_kwargs: Any) -> Any:
        raise UnavailableError("no torch here")

    monkeypatch.setattr(torch_process, "ask", no_torch)
    path, answers = tmp_path / "job.json", []
    path.write_text(json.dumps({**RIGHT_ALONE, **beside}))
    for read in (load_job, lambda file: JobSpec.from_json(file.read_text())):
        try:
            answers.append(objections_to(read(path), BUILT_IN))
        except InvalidInputError as error:
            answers.append(list(error.violations))
    findings = torch_process.check_job(path)
    faults = [each for each in findings if each.level is Level.FAIL]
    answers.append([Violation(each.about, each.found) for each in faults])
    fields = ["optimizer.momentun", "strategy.aggregation.topology", "strategy.num_replicas"]
    for answer in answers:
        assert {each.field for each in answer} == {*fields, *beside}
        assert sorted(map(str, answer)) == sorted(map(str, answers[0]))


@pytest.mark.parametrize(
    "begun",
    [
        {},
        {"strategy": {}},
        *({"strategy": {"type": "DataParallel", "aggregation": {"method": name}}}
          for name in ("AllReduce", "ParameterServer", "Decentralized")),
        {"strategy": {"type": "DataParallel", "options": {"inner": {"type": "ModelParallel"}}}},
        {"strategy": {"type": "ModelParallel"}},
        *({"strategy": {"type": "Federated", "aggregation": {"method": name}}}
          for name in ("FedAvg", "FedProx", "FedYogi")),
        {"strategy": {"type": "Federated", "client_selection": {"method": "Random"}}},
        {"strategy": {"type": "Federated", "options": {"inner": {"type": "DataParallel"}}}},
        {"strategy": {"type": "Federated", "options": {"robust": {"name": "trimmed_mean"}}}},
        {"strategy": {"type": "Federated", "options": {"secure_aggregation": {"weights": "rows"}}}},
        {"strategy": {"type": "Federated"}, "privacy": {"target": {}}},
        {"strategy": {"type": "PopulationBased"}},
        {"strategy": {"type": "PopulationBased", "options": {"inner": {"type": "Federated"}}}},
        {"strategy": {"type": "Custom"}},
        {"execution": {"gradient": "None"}},
        {"initial": {}, "code": {}},
        *({"optimizer": {"schedule": {"name": name}}}
          for name in ("step", "multistep", "exponential", "restarts", "chain", "plateau")),
    ],
)  # fmt: skip
def test_lines_of_the_answers_make_a_job_of_an_empty_file_in_two_rounds(begun: Any) -> None:
    document = begun
    for _ in range(2):
        try:
            JobSpec.parse(document)
        except InvalidInputError as error:
            document = mended(document, error)
    assert JobSpec.parse(document).name == "my-run"


def mended(document: Any, error: InvalidInputError) -> Any:
    """Follow each violation: write its line where it says, or leave out what has no meaning."""
    document = deepcopy(document)
    for violation in error.violations:
        path = violation.field.split(".")
        _, _, line = violation.message.partition("for example ")
        pasted: Any = parse_yaml(line) if line else {path[-1]: None}
        ((key, value),) = pasted.items()
        path = path[: path.index(key)] if key in path else path
        place = document
        for part in path:
            place = place.setdefault(part, {})
        place[key] = value
    return document
