"""Jobs and sites that the planning tests share."""

from functools import cache
from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.tools.memory.estimate import StepMemory, estimate_memory
from stratagem.tools.memory.play import Site
from stratagem.worker.data.sources import DataSources
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, job

SITE = Site(EntryPoints([ALLOW]), torch.device("cpu"), DataSources())
KINDS = "tests.userland.kinds"


def kind_job(kind: str, *, kwargs: Any = None, data: Any = None, **changes: Any) -> JobSpec:
    """A job with one of the five kinds of model."""
    sections: dict[str, Any] = {
        "data": {"entrypoint": f"{KINDS}:{kind}_data", "kwargs": data or {}},
        "loss": "token_cross_entropy" if kind == "transformer" else "cross_entropy",
        "optimizer": {"name": "adam", "lr": 0.001},
    }
    kwargs = kwargs or ({"depth": 2} if kind == "mlp" else {})
    return job({"entrypoint": f"{KINDS}:{kind}", "kwargs": kwargs}, **{**sections, **changes})


def replicas(number: int, **options: Any) -> dict[str, Any]:
    whole = {"type": "DataParallel", "num_replicas": number, "aggregation": {"method": "AllReduce"}}
    return {**whole, "options": options}


def federation(aggregation: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Two clients in one round."""
    return {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 1,
        "aggregation": aggregation,
        "client_selection": {"method": "All"},
        "options": options,
    }


@cache
def estimate(spec: JobSpec, **asked: Any) -> StepMemory:
    """Of a job that many tests compare others with, made once."""
    return estimate_memory(spec, SITE, **asked)
