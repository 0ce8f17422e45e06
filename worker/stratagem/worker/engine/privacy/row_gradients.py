"""The gradient of a step in which no row can be told from its absence (DP-SGD).

    g_i  = gradient of the mean loss of row i, of all parameters as one vector
    sum  = Σ g_i · min(1, C / ‖g_i‖) + N(0, (z·C)²), rounded to a grid      (of the rows drawn)
    grad = sum / expected number of rows

Each row goes through the model alone, as a batch of one (`torch.func`: vmap over grad), so nothing
can mix rows; where torch cannot run a module of the model for many rows at once, one row after the
other. Norms and sums are float64. A row whose gradient is not finite counts as zero: it
must not tell of itself by an error. Buffers stay as they are.
Source: Abadi et al. 2016, https://arxiv.org/abs/1607.00133, Algorithm 1, with Poisson sampling.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from stratagem.common.privacy.noise import rounded_to_grid
from stratagem.worker.data.row_datasets import BatchKeys
from stratagem.worker.engine.privacy.row_budget import RowCosts
from stratagem.worker.engine.privacy.row_noise import RowNoise
from stratagem.worker.engine.step.forward_backward import Counted, Passes, Rows, Window
from stratagem.worker.host.thread_activity import per_thread
from stratagem.worker.user_code.entrypoints import user_code

_MAX_NUMBERS: Final = 1 << 25
"""Numbers of all rows' gradients that are in memory at once."""
_MAX_ROWS: Final = 1024

_ONE_BY_ONE: Final = (nn.RNN, nn.GRU, nn.RNNCellBase)
"""Modules that write into their state in place, which vmap refuses; LSTM it runs."""

Params = Mapping[str, Tensor]
Gradients = Callable[[Params, Any, Any], Params]


@dataclass(slots=True)
class RowGradients:
    """Makes the gradients of the steps of one client's round. Used by one thread."""

    passes: Passes
    named: list[tuple[str, nn.Parameter]]
    """What is trained; frozen parameters get no noise."""
    clip_norm: float
    costs: RowCosts
    noise: RowNoise
    step: int = 0

    def drawn_rows(self) -> Iterator[Tensor]:
        """Yield the rows of each step of the round: perhaps none."""
        for step in range(self.costs.steps_per_round):
            yield self.noise.drawn(step, self.costs.num_rows, self.costs.rate)

    def __call__(self, rows: Rows, window: Window) -> Counted:
        """Make `.grad` the protected mean over these rows, of which there may be none."""
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named}
        passes, num_rows = self.passes, rows.indices.shape[0]
        if num_rows:
            key = window.key(0)
            x, y = passes.gather(
                rows.dataset, rows.indices, rows.activity, BatchKeys(rows.key, key)
            )
            leaves = tree_leaves((x, y))
            _check_rows(leaves, num_rows)
            self.noise = self.noise.after(leaves)
            passes.randomness.begin(*key)
            self._add(sums, x, y, rows)
        for name, param in self.named:
            param.grad = self._noised(name, sums[name]).to(param.dtype).to(param.device)
        self.step += 1
        return Counted(0.0, self.costs.num_expected)

    def _add(self, sums: Mapping[str, Tensor], x: Any, y: Any, rows: Rows) -> None:
        """Add the clipped gradients of rows to the sums, some rows at a time, in order."""
        params = {name: param.detach() for name, param in self.named}
        size = max(
            1, min(_MAX_ROWS, _MAX_NUMBERS // max(1, sum(map(Tensor.numel, params.values()))))
        )
        gradients, here = _row_gradients(self.passes, params), per_thread.activity
        for first in range(0, rows.indices.shape[0], size):
            here.check()
            part = slice(first, first + size)
            with user_code(rows.activity):
                own = gradients(params, *tree_map(itemgetter(part), (x, y)))
            factors = _factors(own, self.clip_norm)
            for name, total in sums.items():
                total.add_(_shrunk(own[name], factors).sum(0))

    def _noised(self, name: str, total: Tensor) -> Tensor:
        sigma = self.costs.noise_multiplier * self.clip_norm
        noise = self.noise.of_tensor(self.step, name, total.numel())
        noised = rounded_to_grid(total.cpu().numpy().ravel() + sigma * noise, sigma)
        return torch.from_numpy(noised / self.costs.num_expected).reshape(total.shape)


def _row_gradients(passes: Passes, params: Params) -> Gradients:
    """Return what computes the gradients of rows, each with the rows as its first dimension."""
    others = {
        name: tensor.detach()
        for name, tensor in (*passes.model.named_parameters(), *passes.model.named_buffers())
        if name not in params
    }

    def loss_of_row(trained: Params, x: Any, y: Any) -> Tensor:
        state = {**others, **trained}

        def model(given: Any) -> Any:
            return functional_call(passes.model, state, (given,))

        one_x, one_y = tree_map(lambda tensor: tensor.unsqueeze(0), (x, y))
        return passes.objective(cast("nn.Module", model), one_x, one_y, 1).mean

    if any(isinstance(module, _ONE_BY_ONE) for module in passes.model.modules()):
        return _one_by_one(grad(loss_of_row))
    return vmap(grad(loss_of_row), in_dims=(None, 0, 0), randomness="different")


def _one_by_one(of_row: Gradients) -> Gradients:
    def of_rows(params: Params, x: Any, y: Any) -> Params:
        num_rows = tree_leaves(x)[0].shape[0]
        rows = [of_row(params, *tree_map(itemgetter(row), (x, y))) for row in range(num_rows)]
        return {name: torch.stack([own[name] for own in rows]) for name in params}

    return of_rows


def _factors(gradients: Params, norm: float) -> Tensor:
    """Return by row what shortens its gradient to the norm; 0 for one that is not finite."""
    squares = sum(g.detach().double().flatten(1).square().sum(1) for g in gradients.values())
    assert isinstance(squares, Tensor)
    length = squares.sqrt()
    factors = norm / length.clamp(min=norm)
    return torch.where(torch.isfinite(length), factors, torch.zeros_like(factors))


def _shrunk(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return gradients times the factors of their rows, in float64; 0 leaves nothing."""
    by_row = factors.reshape(-1, *(1 for _ in gradients.shape[1:]))
    return torch.where(by_row > 0, gradients.double() * by_row, torch.zeros_like(by_row))


def _check_rows(leaves: list[Any], num_rows: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != num_rows:
            kind = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"a batch of {num_rows} rows has a part of {kind}; privacy.unit row needs tensors "
                "whose first dimension is the rows"
            )
