"""What the first step imports, that the ways around it have torch's bits, and that a model is gone
with its last step."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.numerics.shards import assign_shards
from stratagem.worker.engine.forward_backward import run_backward
from tests.every_pair import every_pair
from tests.jobs import job
from tests.repository import ROOT
from tests.worker.engine.support import in_buckets, solo, trainer_of

FIRST_STEPS = """
import sys
import torch
from stratagem.common.job import OptimizerSpec
from stratagem.worker.engine.optimizers import make_optimizer, update
from stratagem.worker.engine.forward_backward import run_backward

for name in ("sgd", "adam", "adamw", "rmsprop", "adagrad"):
    model = torch.nn.Linear(2, 1)
    optimizer = make_optimizer(OptimizerSpec(name=name, lr=0.1), model.named_parameters())
    optimizer.zero_grad()
    run_backward(model(torch.ones(2)).mean(), torch.tensor(2.0))
    update(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True, foreach=False)
update(outer)
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""
LATER = """
import torch._dynamo
from torch.optim import Optimizer
optimizer.zero_grad()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print(len(optimizer.param_groups), "deferred" in repr(vars(Optimizer.zero_grad.__wrapped__)))
"""


@pytest.mark.parametrize(
    ("later", "printed"),
    [("", ["[]"]), pytest.param(LATER, ["[]", "2 False"], marks=pytest.mark.sweep)],
    ids=["first", "later"],
)
def test_torchs_compiler_is_not_imported_before_something_wants_it(
    later: str, printed: list[str]
) -> None:
    program = [sys.executable, "-c", FIRST_STEPS + later]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == printed


def gradients(model: nn.Module, x: Tensor, begin: Tensor | None, *, ours: bool) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    if ours:
        run_backward(loss, begin)
    else:
        loss.backward(begin)
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize(
    ("dtype", "rows", "weight"),
    every_pair([torch.float32, torch.float64, torch.bfloat16], [1, 7], [None, 0.0, 1.0, 7.0, 1.1]),
)
def test_a_backward_pass_has_torchs_bits(
    dtype: torch.dtype, rows: int, weight: float | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    x = torch.randn(rows, 5, dtype=dtype)
    begin = None if weight is None else torch.tensor(weight, dtype=dtype)
    own = gradients(model, x, begin, ours=True)
    assert all(map(torch.equal, own, gradients(model, x, begin, ours=False)))
    assert len(own) == 4


def test_what_needs_no_gradient_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        run_backward(torch.ones(()), torch.ones(()))


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def used(num_shards: int, **changes: Any) -> "weakref.ref[Any]":
    """A model that has trained a step, by a weak reference; nobody else refers to it."""
    trainer = trainer_of(job(**changes))
    exchange = solo(trainer, 1) if num_shards == 1 else in_buckets(trainer, num_shards)
    trainer.train_step(exchange, assign_shards(num_shards, 1)[0], num_shards)
    exchange.close()
    return weakref.ref(next(trainer.model.parameters()))


@pytest.mark.parametrize("num_shards", [1, 2], ids=["alone", "buckets"])
def test_a_model_goes_with_the_last_reference_to_it(num_shards: int) -> None:
    used(num_shards)  # torch loads parts of itself at the first step
    with no_collector():
        assert used(num_shards)() is None


@pytest.mark.parametrize(
    "execution", [{"precision": "Mixed"}, {"gradient": {"Checkpointed": 1}}], ids=str
)
def test_a_model_that_is_changed_goes_with_the_next_collection(execution: dict[str, Any]) -> None:
    found = used(2, execution=execution)
    gc.collect()
    assert found() is None
