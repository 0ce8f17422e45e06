"""Jobs and sites that the planning tests share."""

from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.tools.planning.simulated_step import Site
from stratagem.worker.data.data_sources import DataSources
from stratagem.worker.user_code.entrypoints import EntryPoints

SITE = Site(EntryPoints(["tests.tools.planning.userland:*"]), torch.device("cpu"), DataSources())
USERLAND = "tests.tools.planning.userland"


def job(kind: str, *, kwargs: Any = None, data: Any = None, **changes: Any) -> JobSpec:
    """A job with one of the five kinds of model."""
    is_tokens = kind == "transformer"
    document: dict[str, Any] = {
        "name": "plan",
        "model": {"entrypoint": f"{USERLAND}:{kind}", "kwargs": kwargs or {}},
        "data": {"entrypoint": f"{USERLAND}:{kind}_data", "kwargs": data or {}},
        "loss": "token_cross_entropy" if is_tokens else "cross_entropy",
        "optimizer": {"name": "adam", "lr": 0.001},
        "steps": 10,
        "batch_size": 16,
    }
    return JobSpec.parse({**document, **changes})


def replicas(number: int) -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": number,
        "aggregation": {"method": "AllReduce"},
    }
