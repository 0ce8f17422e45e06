"""Rounds of regions that are federations of their own, in plain numpy and torch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.models.build import build_model
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference import loops
from tests.reference.hooks import Hooks
from tests.reference.plain_job import plainly
from tests.reference.regional_mean import regional_state

CPU = torch.device("cpu")


def nested_loop(
    flat: JobSpec, entrypoints: EntryPoints, regions: Sequence[Sequence[int]], num_inside: int
) -> Mapping[str, Tensor]:
    """The last state of flat.strategy.rounds rounds over regions of num_inside rounds each."""
    hooks = Hooks(flat, entrypoints)
    model = hooks.build(build_model(flat, entrypoints, device=CPU, fresh=True))
    randomness = KeyedRandomness(model, CPU)
    ready = model, prepare(model, plainly(flat), CPU, randomness), randomness, hooks
    world = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for outer in range(flat.strategy.rounds // num_inside):  # type: ignore[union-attr]
        told: dict[int, tuple[float, dict[str, Tensor]]] = {}
        for clients in regions:
            own = world
            for inner in range(1, num_inside + 1):
                updates = {}
                for client in clients:
                    model.load_state_dict(own)
                    number = outer * num_inside + inner
                    rows, _, _ = loops.train_one_client(
                        flat, entrypoints, ready, client, number, CURRENT, None
                    )
                    state = {n: tensor.clone() for n, tensor in model.state_dict().items()}
                    updates[client] = float(rows), state
                pairs = [loops.Update(*updates[client]) for client in clients]
                means = {name: loops._mean_of(name, pairs, CURRENT) for name in world}
                own = {name: mean.to(world[name].dtype) for name, mean in means.items()}
            told |= updates
        named = {f"{at:03}": clients for at, clients in enumerate(regions)}
        means = regional_state(named, told)
        world = {name: mean.to(world[name].dtype) for name, mean in means.items()}
    return world
