"""Checks of whole runs: workers on the device, a coordinator, and what becomes of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import assert_same_bits, data_parallel, model_parallel, train
from tests.crash.rig import until
from tests.device.check_table import SkippedError
from tests.device.steps_checks import ADAM, trainer_on
from tests.jobs import ALLOW, job, user_data, user_model
from tests.repository import ROOT
from tests.tools.memory.support import kind_job
from tests.worker.engine.support import model_of
from tests.worker.engine.support import train as train_here

UNEVEN = user_data("classes", num_rows=55)


@contextmanager
def workers_on(device: torch.device, number: int) -> Iterator[tuple[LocalCluster, Client]]:
    names = [f"worker-{index}" for index in range(number)]
    with (
        LocalCluster(
            workers=number,
            threads=1,
            import_path=[ROOT],
            allow=[ALLOW],
            worker_arguments={name: ["--device", str(device)] for name in names},
        ) as cluster,
        cluster.client() as client,
    ):
        yield cluster, client


def in_one_process(device: torch.device, spec: JobSpec, num_shards: int) -> dict[str, Any]:
    """The model after all steps, in this process."""
    trainer = trainer_on(device, spec)
    train_here(trainer, num_shards, spec.steps or 0)
    return {name: tensor.cpu() for name, tensor in model_of(trainer).items()}


def shared_device(device: torch.device) -> str:
    spec = job("everything", optimizer=ADAM, data=UNEVEN, strategy=data_parallel(2))
    with workers_on(device, 2) as (_, client):
        done = train(client, spec)
    assert_same_bits(done.state, in_one_process(device, spec, 2))
    return f"{done.status.step} steps over {done.status.engine}"


def pipeline(device: torch.device) -> str:
    """The cut may not change a bit: two stages on two workers, and both on one."""
    options: dict[str, Any] = {"protocol": "Pipeline", "micro_batch_size": 3}
    with workers_on(device, 2) as (_, client):
        done = [
            train(client, job("mlp", data=UNEVEN, strategy=model_parallel(cut, **options)))
            for cut in ({"0 1": "worker-0", "2": "worker-1"}, {"0 1": "worker-0", "2": "worker-0"})
        ]
    assert_same_bits(done[0].state, done[1].state)
    return f"{done[0].status.step} steps, {done[0].status.engine}"


def out_of_memory(device: torch.device) -> str:
    """The worker's process stays, and so does what it has of the device's memory."""
    huge = job(user_model("mlp", hidden=10**12))
    with workers_on(device, 1) as (cluster, client):
        train(client, job())
        pid, before = cluster.processes["worker-0"].pid, client.workers()[0]
        try:
            client.submit(huge).result()
        except UserCodeError as error:
            told = str(error)
        else:
            raise AssertionError("a job of 50 TB has run")
        assert "memory" in told, told
        done = train(client, job())
        assert done.status.step == 10
        assert cluster.processes["worker-0"].pid == pid
        assert client.workers()[0].incarnation == before.incarnation
    return told[:80]


def lost_device(device: torch.device) -> str:
    """An index that is not below the rows of its table fails an assertion of its kernel."""
    if device.type == "cpu":
        raise SkippedError("the device is lost by the CUDA driver; see test_lost_device.py")
    outside = kind_job("embedding", kwargs={"num_items": 10})
    with workers_on(device, 1) as (cluster, client):
        pid = cluster.processes["worker-0"].pid
        try:
            client.submit(outside).result()
        except UserCodeError as error:
            told = str(error)
        else:
            raise AssertionError("an index outside of its table was trained on")
        assert "device-side assert" in told, told
        train(client, job())
        until(lambda: cluster.processes["worker-0"].is_ready, "worker-0 serves")
        assert cluster.processes["worker-0"].pid != pid
    return told[:80]
