"""The jobs of the core's tests: small, of every strategy, and never trained."""

import json
from collections.abc import Mapping
from typing import Any

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_calls import objections_to
from tests.jobs import NOT_TRAINED, document


def job_text(strategy: Mapping[str, object], **changes: object) -> str:
    """A job as it is submitted: 100 rows, batches of 10, two epochs."""
    epochs = None if strategy["type"] in ("Federated", "PopulationBased") else 2
    sections: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 10,
        "seed": None,
        "steps": None,
        "checkpoint": None,
        "epochs": epochs,
    }
    return json.dumps(document(**{**sections, "strategy": strategy, **changes}))


def evaluation_only(strategy: Mapping[str, object], **changes: object) -> str:
    """A job that trains nothing: 20 rows in batches of 3, evaluated once."""
    evaluation = {"split": "test", "metrics": ["accuracy"], "batch_size": 3}
    sections = {**NOT_TRAINED, "epochs": None, "evaluation": evaluation}
    return job_text(strategy, **{**sections, **changes})


LOCAL = {"type": "Local"}
DATA_PARALLEL = {"type": "DataParallel", "num_replicas": 3, "aggregation": {"method": "AllReduce"}}
FEDERATED = {
    "type": "Federated",
    "num_clients": 4,
    "rounds": 3,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
EVALUATION = {"split": "test", "every": "1 epoch", "metrics": ["accuracy"], "best": "accuracy"}
GOSSIP = {**DATA_PARALLEL, "aggregation": {"method": "Decentralized", "topology": "ring"}}


def population(
    size: int = 4,
    generations: int = 3,
    inner: dict[str, Any] | None = None,
    exploit: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    if inner:
        options["inner"] = inner
    return {
        "type": "PopulationBased",
        "population_size": size,
        "generations": generations,
        "exploit": exploit or {"method": "Truncation", "fraction": 0.25},
        "explore": {"method": "Perturbation", "factor": 0.2},
        "options": options,
    }


POPULATION_SECTIONS: dict[str, Any] = {
    "search_space": {"optimizer.lr": {"low": 0.001, "high": 1.0, "scale": "log"}},
    "steps_per_generation": 5,
    "evaluation": {"split": "test", "metrics": ["accuracy"], "best": "accuracy"},
}


def check_at_submit(text: str) -> None:
    """What happens to a job at submit."""
    found = JobSpec.from_json(text)
    violations = objections_to(found, BUILT_IN)
    if violations:
        raise InvalidInputError(violations=violations)


def refusal(text: str) -> str:
    """What a job is refused with at submit."""
    try:
        check_at_submit(text)
    except InvalidInputError as error:
        return str(error)
    raise AssertionError("the job is taken")


INNER = {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}}


def silos(
    num_clients: int = 2, rounds: int = 3, inner: Any = None, **changes: Any
) -> dict[str, Any]:
    strategy = {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": rounds,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"inner": inner or INNER},
    }
    return strategy | changes


def stopping(strategy: Mapping[str, Any], **stop: object) -> str:
    """A job whose metric never improves after the first evaluation: accuracy rises and is to fall;
    under Federated the loss stays."""
    evaluation: dict[str, Any] = {"split": "test", "mode": "min", "stop": {"patience": 2} | stop}
    if strategy["type"] == "Federated":
        return job_text({**strategy, "rounds": 9}, evaluation=evaluation | {"best": "loss"})
    evaluation |= {"best": "accuracy", "metrics": ["accuracy"]}
    return job_text(strategy, evaluation=evaluation, epochs=9, checkpoint={"every": "5 steps"})
