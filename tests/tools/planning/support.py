"""Jobs and sites that the planning tests share."""

from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.tools.planning.job_site import Site
from stratagem.worker.data.data_sources import DataSources
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
    return job({"entrypoint": f"{KINDS}:{kind}", "kwargs": kwargs or {}}, **{**sections, **changes})


def replicas(number: int) -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": number,
        "aggregation": {"method": "AllReduce"},
    }
