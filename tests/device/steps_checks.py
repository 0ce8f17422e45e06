"""Checks of training steps in one process, by the worker's own trainer."""

import time
from dataclasses import replace
from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.tools.memory.estimate import estimate_memory, text_of
from stratagem.tools.memory.play import measure_training
from stratagem.worker.engine import Trainer, build_trainer
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.device.check_table import SkippedError
from tests.jobs import ALLOW, job
from tests.tools.memory.support import SITE, kind_job
from tests.worker.engine.support import train

ALLOWED = EntryPoints([ALLOW])
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "Half"},
    "bf16 mixed": {"precision": "Mixed"},
    "fp16 mixed": {"precision": "Mixed", "amp_dtype": "float16"},
    "fp64": {"precision": "Full"},
}


def trainer_on(device: torch.device, spec: JobSpec) -> Trainer:
    return build_trainer(spec, ALLOWED, device=device, fresh=True)


def trained(device: torch.device, spec: JobSpec, num_steps: int = 10) -> str:
    """The fingerprint after some steps over two shards; each loss is a number."""
    trainer = trainer_on(device, spec)
    losses = train(trainer, 2, num_steps)
    assert all(loss == loss and abs(loss) < 1e6 for loss in losses), losses
    return str(trainer.fingerprint())


def precisions(device: torch.device) -> str:
    for name, execution in PRECISIONS.items():
        spec = job("everything", optimizer=ADAM, execution=execution)
        assert trained(device, spec) == trained(device, spec), name
    return ", ".join(PRECISIONS)


def compiled(device: torch.device) -> str:
    if device.type == "cpu":
        raise SkippedError(
            "a C++ compiler may take longer than a check may; see test_torch_compile.py"
        )
    spec = job("mlp", optimizer=ADAM, execution={"mode": "Lazy"})
    begun_s = time.perf_counter()
    first = trained(device, spec, num_steps=2)
    took_s = time.perf_counter() - begun_s
    assert first == trained(device, spec, num_steps=2)
    return f"compiled in {took_s:.1f} s"


def snapshots(device: torch.device) -> str:
    """A copy of the state, while the steps after it are computed, and on from it in a second
    trainer."""
    spec = kind_job("mlp", kwargs={"width": 512}, data={"width": 512})
    straight = trainer_on(device, spec)
    train(straight, 2, 3)
    begun_s = time.perf_counter()
    tensors, metadata = straight.copy_state()
    stall_s = time.perf_counter() - begun_s
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    begun_s = time.perf_counter()
    train(straight, 2, 3)
    step_s = (time.perf_counter() - begun_s) / 3
    assert all(torch.equal(tensor, held[name]) for name, tensor in tensors.items())
    resumed = build_trainer(spec, ALLOWED, device=device, fresh=False)
    resumed.load_state(tensors, metadata)
    train(resumed, 2, 3)
    assert resumed.fingerprint() == straight.fingerprint()
    size = text_of(sum(tensor.nbytes for tensor in tensors.values()))
    return f"{size}: stall {1e3 * stall_s:.1f} ms, a step {1e3 * step_s:.1f} ms"


def estimate(device: torch.device) -> str:
    """Of a step on the device; what its libraries take inside an operation is not in it."""
    site = replace(SITE, device=device)
    told = []
    for kind in ("mlp", "transformer"):
        spec = kind_job(kind, batch_size=64)
        expected = estimate_memory(spec, site).total
        measured = measure_training(spec, site, ShardOwners(0, 1, 1))
        told.append(f"{kind} {expected / measured:.3f}")
        most = 0.15 if device.type == "cpu" else 0.1
        assert abs(expected / measured - 1) <= most, ", ".join(told)
    return ", ".join(told)
