"""Protect the privacy of a client's rows: clip its update, or train its steps by DP-SGD.

A client may send its change to the global state clipped as one vector of all its floats. Where its
rows are protected, each step clips the gradient of every row and adds noise, and a budget limits
the number of rounds.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from stratagem.common.base.errors import BudgetSpentError, InvalidInputError, Violation
from stratagem.common.base.text import beyond_text
from stratagem.common.job import JobSpec
from stratagem.common.job.privacy import mixes_rows
from stratagem.common.privacy import accountant
from stratagem.common.privacy.noise import (
    Floats,
    derived_key,
    rounded_to_grid,
    standard_normal,
    uniform,
)
from stratagem.common.schema.document import refuse
from stratagem.common.strategy import Federated
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.engine.forward_backward import Counted, Passes, Rows, Window
from stratagem.worker.host.stalls import per_thread
from stratagem.worker.models.tensors import name_of
from stratagem.worker.user_code.entrypoints import user_code

# ---- Clipped update ----
#
#     Δ = w - w_global, of all floating tensors together, buffers and single numbers included
#     Δ · min(1, C / ‖Δ‖), computed in float64, rounded to the tensors' types
#
# A rounded change may be a last bit too long, so it is made shorter until its norm, computed in
# float64, is at most C. Integers and bools do not change: they would reveal the client's rows.
# Source: McMahan et al. 2018, https://arxiv.org/abs/1710.06963 (flat clipping).

_SHORTER: Final = 2.0**-24
"""The initial amount by which the clipping factor is reduced if rounding makes the clipped change
too long; it is doubled until the change fits."""


@dataclass(frozen=True, slots=True)
class ClippedChange:
    """A client's clipped change, as it is sent: keyed by the names of the state, on the CPU."""

    tensors: Mapping[str, Tensor]
    is_within: bool
    """True if the change did not exceed the norm before clipping."""


def clipped_change(
    base: Mapping[str, Tensor], trained: Mapping[str, Tensor], norm: float
) -> ClippedChange:
    """Return the change from `base` to `trained`, clipped to the norm.

    Tied tensors count once, and stay tied. The coordinator rejects changes that are not finite.
    """
    changes, of_storage, result = dict[str, Tensor](), dict[tuple[object, ...], str](), {}
    for name, tensor in trained.items():
        first = of_storage.setdefault(_place(name, tensor), name)
        result[name] = first
        if first == name:
            changes[name] = _difference(base[name], tensor)
    length = _norm(changes.values())
    is_within = length <= norm
    shrink, sent = 0.0, _scaled(changes, trained, 1.0)
    while _norm(sent.values()) > norm:
        shrink = 2 * shrink or _SHORTER
        sent = _scaled(changes, trained, min(1.0, norm / length) * (1 - shrink))
    return ClippedChange({name: sent[first] for name, first in result.items()}, is_within)


def _place(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors only."""
    if not tensor.numel():
        return (name,)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """Return each element's change in float64; 0 if the bits are equal, even of NaN or infinity."""
    after = after.detach().cpu()
    before = before.detach().cpu()
    if not after.is_floating_point():
        return before
    difference = after.double() - before.double()
    return torch.where(after == before, torch.zeros_like(difference), difference)


def _norm(changes: Iterable[Tensor]) -> float:
    squares = [float(c.double().square().sum()) for c in changes if c.is_floating_point()]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _scaled(
    changes: Mapping[str, Tensor], trained: Mapping[str, Tensor], factor: float
) -> dict[str, Tensor]:
    """Return the changes times the factor, in the types in which they are sent."""
    return {
        name: (change * factor).to(trained[name].dtype).contiguous()
        if change.is_floating_point()
        else change.contiguous()
        for name, change in changes.items()
    }


# ---- Privacy budget of a client's rows ----
#
# A client refuses a round that would exceed the budget.


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The sampling of one client's rows in DP-SGD, and its privacy cost."""

    num_rows: int
    batch_size: int
    local_epochs: int
    noise_multiplier: float
    delta: float

    @classmethod
    def of(cls, job: JobSpec, num_rows: int) -> "RowCosts":
        """Make the costs of a client with `num_rows` rows."""
        assert job.privacy is not None
        assert job.privacy.noise_multiplier is not None
        assert isinstance(job.strategy, Federated)
        return cls(
            num_rows,
            job.batch_size,
            job.strategy.options.local_epochs,
            job.privacy.noise_multiplier,
            job.privacy.target.delta,
        )

    @property
    def rate(self) -> float:
        """Probability that a row takes part in a step."""
        return min(1.0, self.batch_size / self.num_rows)

    @property
    def num_expected(self) -> float:
        """Expected number of rows in a step."""
        return self.rate * self.num_rows

    @property
    def steps_per_round(self) -> int:
        """Number of steps per round: as many as its local epochs would have in whole batches."""
        return self.local_epochs * -(-self.num_rows // self.batch_size)

    def epsilon_after(self, num_rounds: int) -> float:
        """Return the spent epsilon. Raises InvalidInputError without the accountant."""
        if not accountant.is_installed():
            raise InvalidInputError.at("privacy", f"this worker {accountant.NEEDED}")
        num_steps = num_rounds * self.steps_per_round
        return accountant.epsilon_after(num_steps, self.noise_multiplier, self.rate, self.delta)


def check_budget(costs: RowCosts, target: float | None, num_spent: int) -> float:
    """Return epsilon after the round that follows `num_spent` ones. Raises BudgetSpentError if it
    exceeds the target."""
    epsilon = costs.epsilon_after(num_spent + 1)
    if target is not None and epsilon > target:
        before = costs.epsilon_after(num_spent)
        raise BudgetSpentError(
            f"privacy budget: {before:.3g} of {target:g} spent in {num_spent} rounds, and one more "
            f"would cost {beyond_text(epsilon, target)}"
        )
    return epsilon


# ---- Checks of the model ----
#
# The model is checked once it is built, before anything is trained.

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

_TOO_NARROW: Final = (
    "which rounds the gradient of a row before it is clipped; float32 and float64 are allowed"
)


def check_rows_apart(job: JobSpec, model: nn.Module) -> None:
    """Raise InvalidInputError for a model without trained parameters, or with modules that mix the
    rows of a batch or keep sums over them."""
    if job.privacy is None or job.privacy.unit != "row":
        return
    wrong = [
        Violation("model", mixes_rows(name or "the model", type(module).__name__))
        for name, module in model.named_modules()
        if isinstance(module, _NORMS) and _keeps_sums(module)
    ]
    if not any(param.requires_grad for param in model.parameters()):
        wrong.append(Violation("model", "has no parameter that is trained"))
    narrow = (
        Violation("model", f"{name} is {name_of(param.dtype)}, {_TOO_NARROW}")
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype.itemsize < torch.float32.itemsize
    )
    wrong += islice(narrow, 1)
    refuse(wrong)


def _keeps_sums(module: nn.Module) -> bool:
    """Return whether a normalization layer uses or keeps statistics over several rows."""
    is_batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    is_instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    return (is_batch and not is_instance) or bool(module.track_running_stats)


# ---- Draws and noise of a round ----
#
# The rows of each step and its noise are functions of a secret that lies where the rows lie and of
# all that the round is computed from. So a round that is done again has the same rows and the same
# noise, while noise is never used for another sum, of which the difference could be taken:
#
#     round  = name of the round, base state, job, client, number of rows    (in both keys)
#     draw   = HKDF(secret, round, step)              row i takes part if uniform(i) < rate
#     noise  = HKDF(secret, round, step, rows read so far, tensor)
#
# The name of a round holds the run, its submission and how often it went back; it does not hold how
# often the round was begun. The rows as they were read, hashed over the steps of the round, stand
# for themselves and for the parameters, which follow from the base and them: if the site's data
# change between two attempts, the second one has other noise.


@dataclass(frozen=True, slots=True)
class RowNoise:
    """The random choice of rows and the noise in one round of one client."""

    secret: bytes
    names: tuple[str, ...]
    """All values that determine the round, besides the rows themselves."""
    is_seeded: bool = False
    """True if anybody can compute the noise from the seed, so that the rows need not be hashed."""
    digest: str = ""
    """SHA-256 of the rows of the steps so far."""

    @property
    def digest_of_names(self) -> str:
        """A text that identifies this round in an audit, different for every round."""
        return hashlib.sha256(derived_key(self.secret, ["name", *self.names])).hexdigest()[:32]

    def drawn(self, step: int, num_rows: int, rate: float) -> Tensor:
        """Return the rows of a step (from 0), each selected independently; there may be none."""
        if rate >= 1.0:
            return torch.arange(num_rows)
        key = derived_key(self.secret, ["draw", *self.names, str(num_rows), str(step)])
        return torch.from_numpy(np.flatnonzero(uniform(key, 0, num_rows) < rate))

    def after(self, rows: Iterable[Tensor]) -> Self:
        """Return this noise after a step that has read these rows: they become part of `digest`."""
        if self.is_seeded:
            return self
        digest = hashlib.sha256(self.digest.encode())
        for tensor in rows:
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return replace(self, digest=digest.hexdigest())

    def of_tensor(self, step: int, name: str, num: int) -> Floats:
        """Return `num` standard normal values: the noise of a step for the tensor of this name."""
        key = derived_key(self.secret, ["rows", *self.names, str(step), self.digest, name])
        return standard_normal(key, 0, num)


# ---- Gradients of protected rows (DP-SGD) ----
#
#     g_i  = gradient of the mean loss of row i, of all parameters as one vector
#     sum  = Σ g_i · min(1, C / ‖g_i‖) + N(0, (z·C)²), rounded to a grid      (of the rows drawn)
#     grad = sum / expected number of rows
#
# Each row goes through the model alone, as a batch of one (`torch.func`: vmap over grad), so
# nothing can mix rows; where torch cannot run a module of the model for many rows at once, one row
# after the other. Norms and sums are float64. A row whose gradient is not finite counts as zero: an
# error would reveal it. Buffers stay as they are. Source: Abadi et al. 2016,
# https://arxiv.org/abs/1607.00133, Algorithm 1, with Poisson sampling.

_MAX_NUMBERS: Final = 1 << 25
"""Maximum number of elements of per-row gradients in memory at once."""
_MAX_ROWS: Final = 1024

_ONE_BY_ONE: Final = (nn.RNN, nn.GRU, nn.RNNCellBase)
"""Modules that write into their state in place, which vmap refuses; LSTM works."""

Params = Mapping[str, Tensor]
Gradients = Callable[[Params, Any, Any], Params]


@dataclass(slots=True)
class RowGradients:
    """Computes the protected gradients in one client's round. Used by one thread."""

    passes: Passes
    named: list[tuple[str, nn.Parameter]]
    """The trained parameters; frozen ones get no noise."""
    clip_norm: float
    costs: RowCosts
    noise: RowNoise
    step: int = 0

    def drawn_rows(self) -> Iterator[Tensor]:
        """Yield the randomly selected rows of each step of the round; perhaps none."""
        for step in range(self.costs.steps_per_round):
            yield self.noise.drawn(step, self.costs.num_rows, self.costs.rate)

    def __call__(self, rows: Rows, window: Window) -> Counted:
        """Set `.grad` to the clipped and noised mean gradient over these rows (maybe none)."""
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
        """Add the clipped gradients of the rows to the sums, a few rows at a time, in order."""
        params = {name: param.detach() for name, param in self.named}
        size = max(
            1, min(_MAX_ROWS, _MAX_NUMBERS // max(1, sum(map(Tensor.numel, params.values()))))
        )
        gradients, activity = _row_gradients(self.passes, params), per_thread.activity
        for first in range(0, rows.indices.shape[0], size):
            activity.check()
            part = slice(first, first + size)
            with user_code(rows.activity):
                stacked = gradients(params, *tree_map(itemgetter(part), (x, y)))
            factors = _factors(stacked, self.clip_norm)
            for name, total in sums.items():
                total.add_(_shrunk(stacked[name], factors).sum(0))

    def _noised(self, name: str, total: Tensor) -> Tensor:
        sigma = self.costs.noise_multiplier * self.clip_norm
        noise = self.noise.of_tensor(self.step, name, total.numel())
        noised = rounded_to_grid(total.cpu().numpy().ravel() + sigma * noise, sigma)
        return torch.from_numpy(noised / self.costs.num_expected).reshape(total.shape)


def _row_gradients(passes: Passes, params: Params) -> Gradients:
    """Return a function that computes the gradients of rows, stacked along dimension 0."""
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
        return {name: torch.stack([gradients[name] for gradients in rows]) for name in params}

    return of_rows


def _factors(gradients: Params, norm: float) -> Tensor:
    """Return per row the factor that clips its gradient to the norm; 0 if it is not finite."""
    squares = sum(g.detach().double().flatten(1).square().sum(1) for g in gradients.values())
    assert isinstance(squares, Tensor)
    length = squares.sqrt()
    factors = norm / length.clamp(min=norm)
    return torch.where(torch.isfinite(length), factors, torch.zeros_like(factors))


def _shrunk(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return the gradients times their rows' factors, in float64; a factor of 0 gives exactly 0."""
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
