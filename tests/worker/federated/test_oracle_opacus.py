"""Another implementation of DP-SGD, where it is installed: opacus finds the same gradients of rows,
the same clipped sums, and about the same epsilon. It is needed for nothing else."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.privacy import accountant
from stratagem.worker.data.datasets import Gather
from stratagem.worker.engine.forward_backward import Passes
from stratagem.worker.federated import row_privacy
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.step_function import make_objective
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.support import ALLOWED, CPU

opacus: Any = pytest.importorskip(
    "opacus", reason="needs opacus 1.6, by hand: pip install opacus opt_einsum --no-deps"
)

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""opacus divides by the norm + 1e-6."""


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 3)),
        nn.Conv2d(1, 6, 2),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 5),
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of opacus
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("norm", [0.1, 2.0, 1000.0])
def test_clipped_sums_are_those_of_opacus(num_rows: int, norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 12, generator=generator)
    y = torch.randint(5, (num_rows,), generator=generator)
    ours, theirs, spec = model(), opacus.GradSampleModule(model()), federated()
    randomness = KeyedRandomness(ours, CPU)
    passes = Passes(
        ours,
        make_objective(spec, ALLOWED),
        Gather(torch.float32, CPU),
        randomness,
        prepare(ours, spec, CPU, randomness),
    )
    params = {name: param.detach() for name, param in ours.named_parameters()}
    found = row_privacy._row_gradients(passes, params)(params, x, y)
    factors = row_privacy._factors(found, norm)
    sgd = torch.optim.SGD(theirs.parameters(), lr=1.0)
    optimizer = opacus.optimizers.DPOptimizer(
        sgd, noise_multiplier=0.0, max_grad_norm=norm, expected_batch_size=1
    )
    nn.functional.cross_entropy(theirs(x), y, reduction="mean").backward()
    optimizer.clip_and_accumulate()
    for name, param in theirs._module.named_parameters():
        torch.testing.assert_close(found[name], param.grad_sample, **CLOSE)  # type: ignore[arg-type]
        total = row_privacy._shrunk(found[name], factors).sum(0).float()
        torch.testing.assert_close(total, param.summed_grad, **CLOSE)  # type: ignore[arg-type]


def test_epsilon_is_about_that_of_opacus() -> None:
    theirs = opacus.accountants.PRVAccountant()
    theirs.history = [(1.0, 0.1, 100)]
    ours = accountant.epsilon_after(100, 1.0, 0.1, 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=0.01)
