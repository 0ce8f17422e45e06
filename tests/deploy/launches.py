"""Launches of workers on Kubernetes, as tests ask for them."""

from __future__ import annotations

from typing import Any

from stratagem.client.launch.kubernetes import Object, PodShape, kubernetes_job
from stratagem.client.launch.workers import WorkerLaunch, launch_of
from stratagem.common.base.ids import RunId
from tests.jobs import job

INSECURE = "--allow-insecure-network"


def launched(num_workers: int, *options: str, run_id: str = "digits") -> WorkerLaunch:
    folders = ("/srv/code",)
    return launch_of(job(), RunId(run_id), "head:7070", num_workers, "python", folders, options)


def shape(**changed: Any) -> PodShape:
    asked: dict[str, Any] = {
        "namespace": "stratagem",
        "image": "stratagem-worker:1",
        "per_pod": 1,
        "cpus": 3,
        "memory": "4Gi",
        "gpus": 0,
        "queue": None,
        "secret": None,
        "pool": None,
        "metrics": True,
    }
    return PodShape(**asked | changed)


def template(made: Object) -> Object:
    """The pods of a Job."""
    found: Object = made["spec"]["template"]
    return found


def launched_pod(per_pod: int, **changed: Any) -> Object:
    options = () if "secret" in changed else (INSECURE,)
    return template(kubernetes_job(launched(per_pod, *options), shape(per_pod=per_pod, **changed)))
