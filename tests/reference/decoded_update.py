"""What the coordinator makes of a client's coded update; see `reference.federated_loop`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from stratagem.common.compression import TensorLayout, derive, make_codec
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated


def is_coded(job: JobSpec) -> bool:
    """Codec none is no codec: nothing is added to what it was taken from."""
    return job.compression is not None and job.compression.codec != "none"


def received(
    job: JobSpec,
    model: nn.Module,
    world: Mapping[str, Tensor],
    round_num: int,
    client: int,
    numerics: int,
) -> dict[str, Tensor]:
    """The trained parameters of the model after the way over the wire: by name, tied ones under
    each of their names. The difference to the global state is coded, in order of name."""
    assert job.compression is not None
    named = model.named_parameters()  # tied ones once, under the first of their names
    sent = [each for each in named if each[1].requires_grad and not _is_kept(job, each[0])]
    trained = {name: param.detach() for name, param in sorted(sent, key=lambda each: each[0])}
    layout = [TensorLayout(f"model/{name}", tuple(p.shape)) for name, p in trained.items()]
    codec = make_codec(job.compression, layout, job.seed, with_feedback=False, numerics=numerics)
    seed = job.seed if job.compression.seed is None else job.compression.seed
    key = derive(seed, round_num, client)
    moves = [(p - world[name]).reshape(-1).numpy() for name, p in trained.items()]
    payload, _ = codec.encode(moves, codec.initial_state(), key)
    decoded = dict(zip(trained, codec.decode(payload, key), strict=True))
    new = {
        name: world[name] + torch.from_numpy(decoded[name]).view(p.shape)
        for name, p in trained.items()
    }
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(every[name]): name for name in trained}
    return {name: new[first[id(p)]] for name, p in every.items() if id(p) in first}


def _is_kept(job: JobSpec, name: str) -> bool:
    """Whether a tensor is personal, and not sent."""
    patterns = job.strategy.options.personal if isinstance(job.strategy, Federated) else None
    return any(fnmatchcase(name, pattern) for pattern in patterns or ())
