"""The job that the tests run: small, of the entry points in `tests.userland`, with any section
replaced."""

from typing import Any

from stratagem.common.job import JobSpec

ALLOW = "tests.userland.*:*"
"""What workers of the tests are given as their list of entry points."""
LOSSES = "tests.userland.losses"
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
NOT_TRAINED: dict[str, Any] = {
    "execution": {"gradient": "None"},
    "optimizer": None,
    "batch_size": None,
    "steps": None,
    "checkpoint": None,
}
"""The sections of a job that only evaluates."""


def user_model(name: str, **kwargs: Any) -> dict[str, Any]:
    """A model of `tests.userland.models`, or of another module as "acting_models:Failing"."""
    place = name if ":" in name else f"models:{name}"
    return {"entrypoint": f"tests.userland.{place}", "kwargs": kwargs}


def user_data(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"entrypoint": f"tests.userland.data:{name}", "kwargs": kwargs}


def document(model: str | dict[str, Any] = "mlp", **sections: Any) -> dict[str, Any]:
    """A job as users write it: ten steps of momentum SGD on 50 rows, 16 at a time and
    in five segments.

    `sections` replace whole ones, and None leaves one out; steps and segments are left out where
    the strategy counts rounds or generations.
    """
    whole: dict[str, Any] = {
        "name": "test",
        "model": user_model(model) if isinstance(model, str) else model,
        "data": user_data("classes"),
        "loss": "cross_entropy",
        "optimizer": SGD,
        "steps": 10,
        "checkpoint": {"every": "2 steps"},
        "batch_size": 16,
        "seed": 3,
    }
    if (sections.get("strategy") or {}).get("type") in ("Federated", "PopulationBased"):
        del whole["steps"], whole["checkpoint"]
    whole |= sections
    return {name: section for name, section in whole.items() if section is not None}


def job(model: str | dict[str, Any] = "mlp", **sections: Any) -> JobSpec:
    """The same, parsed."""
    return JobSpec.parse(document(model, **sections))
