"""What "correct" means where updates count otherwise than by rows: each formula of its paper over
whole vectors of float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, FedProx
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.objective import objective_of
from tests.reference.row_batches import read

Rows = NDArray[np.float64]
Combine = Callable[[Rows, Rows], Rows]
"""(the updates as rows, the state) -> the next state."""


def q_fedavg(base: Rows, rows: Rows, losses: Sequence[float], q: float, lr: float) -> Rows:
    """The next state, of updates as rows (Li et al., 2020, Algorithm 2)."""
    lipschitz, deltas, total = 1.0 / lr, np.zeros_like(base), 0.0
    for row, loss in zip(rows, losses, strict=True):
        gradient, raised = lipschitz * (base - row), loss + 1e-10
        deltas = deltas + raised**q * gradient
        total += q * raised ** (q - 1) * (gradient**2).sum() + lipschitz * raised**q
    return np.asarray(base - deltas / total)


def fednova(base: Rows, rows: Rows, num_rows: Sequence[float], lengths: Sequence[float]) -> Rows:
    """The next state, of updates as rows (Wang et al., 2020, equation 6)."""
    p = np.array(num_rows) / sum(num_rows)
    directions = (base - rows) / np.array(lengths)[:, None]
    return np.asarray(base - (p @ np.array(lengths)) * (p @ directions))


def constant_steps(num_steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """How far steps of SGD go with lr 1 and a gradient of one, which FedProx pulls back."""
    place = velocity = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1.0 - pull * place
        place += velocity
    return place


def nova_state(
    job: JobSpec,
    updates: Sequence[tuple[float, Mapping[str, Tensor]]],
    base: Mapping[str, Tensor],
    trained: set[str],
) -> dict[str, Tensor]:
    """The next state under FedNova. updates: rows and state of each client."""
    assert isinstance(job.strategy, Federated)
    rows, states = zip(*updates, strict=True)
    aggregation, epochs = job.strategy.aggregation, job.strategy.options.local_epochs
    pull = job.optimizer.lr * aggregation.mu if isinstance(aggregation, FedProx) else 0.0
    steps = [epochs * -(-int(num) // job.batch_size) for num in rows]
    momentum = job.optimizer.kwargs.get("momentum", 0.0)
    lengths = [constant_steps(num, momentum, pull) for num in steps]

    def combine(base: Rows, each: Rows) -> Rows:
        return fednova(base, each, rows, lengths)

    return weighed_state(combine, rows, rows, states, base, trained)


def loss_before(
    job: JobSpec,
    entrypoints: EntryPoints,
    model: nn.Module,
    randomness: KeyedRandomness,
    client: int,
) -> float:
    """The mean loss of the model as it stands over a client's rows: in eval mode, in order."""
    assert isinstance(job.strategy, Federated)
    share = ClientShare(client, job.strategy.num_clients)
    own = load_data(job, entrypoints, DataSources(), share)["train"]
    gather, objective = (
        Gather(rows_dtype(job, model), torch.device("cpu")),
        objective_of(job, entrypoints),
    )
    model.eval()
    total, weight = 0.0, 0.0
    for number, rows in enumerate(torch.arange(len(own)).split(job.batch_size)):
        key = ("evaluate", "train", number)
        x, y = read(gather, own, rows, ("row", "evaluate", "train"), key, randomness)
        with torch.no_grad():
            found = objective(model, x, y, len(rows))
        total += float(found.mean) * found.weight
        weight += found.weight
    model.train()
    return total / weight


def fair_state(
    job: JobSpec,
    updates: Sequence[tuple[float, Mapping[str, Tensor]]],
    losses: Sequence[float],
    base: Mapping[str, Tensor],
    trained: set[str],
) -> dict[str, Tensor]:
    """The next state under q-FedAvg. updates: rows and state of each client."""
    assert isinstance(job.strategy, Federated)
    q, (rows, states) = job.strategy.options.q or 0.0, zip(*updates, strict=True)
    means = [(loss + 1e-10) ** q for loss in losses]

    def combine(base: Rows, each: Rows) -> Rows:
        return q_fedavg(base, each, losses, q, job.optimizer.lr)

    return weighed_state(combine, means, rows, states, base, trained)


def weighed_state(
    combine: Combine,
    means: Sequence[float],
    rows: Sequence[float],
    states: Sequence[Mapping[str, Tensor]],
    base: Mapping[str, Tensor],
    trained: set[str],
) -> dict[str, Tensor]:
    """The next state, in float64: `combine` makes the trained parameters, as one vector; other
    floats are the mean by `means`, integers those of the client with most rows."""

    def row(state: Mapping[str, Tensor]) -> Rows:
        parts = [state[name].double().flatten().numpy() for name in base if name in trained]
        return np.concatenate(parts)

    whole = torch.from_numpy(combine(row(base), np.stack([row(state) for state in states])))
    found: dict[str, Tensor] = {}
    for name, tensor in base.items():
        if name in trained:
            found[name], whole = whole[: tensor.numel()].view(tensor.shape), whole[tensor.numel() :]
        elif tensor.is_floating_point():
            pairs = zip(means, states, strict=True)
            found[name] = sum(n * s[name].double() for n, s in pairs) / sum(means)  # type: ignore[assignment]
        else:
            found[name] = states[rows.index(max(rows))][name]
    return found
