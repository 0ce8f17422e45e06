"""What the first step of a process imports, and that the ways around it have torch's bits."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from stratagem.worker.engine.step.backward_pass import run_backward
from tests.repository import ROOT

FIRST_STEPS = """
import sys
import torch
from stratagem.common.job import OptimizerSpec
from stratagem.worker.engine.optim.optimizers import make_optimizer, update
from stratagem.worker.engine.step.backward_pass import run_backward

for name in ("sgd", "adam", "adamw", "rmsprop", "adagrad"):
    model = torch.nn.Linear(2, 1)
    optimizer = make_optimizer(OptimizerSpec(name=name, lr=0.1), model.named_parameters())
    optimizer.zero_grad()
    run_backward(model(torch.ones(2)).mean(), torch.tensor(2.0))
    update(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))

import torch._dynamo
from torch.optim import Optimizer
optimizer.zero_grad()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print(len(optimizer.param_groups), "deferred" in repr(vars(Optimizer.zero_grad.__wrapped__)))
"""


def test_torchs_compiler_is_not_imported_before_something_wants_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_STEPS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["[]", "2 False"]


def gradients(model: nn.Module, x: Tensor, begin: Tensor | None, *, ours: bool) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    if ours:
        run_backward(loss, begin)
    else:
        loss.backward(begin)
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("weight", [None, 0.0, 1.0, 7.0, 1.1])
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
