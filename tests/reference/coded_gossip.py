"""The mixing of CHOCO-SGD (https://arxiv.org/abs/1902.00340); see `gossip`.

Shares the codecs, which define their bits, with the engine; none of its state or transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stratagem.common.compression import State, TensorLayout, derive, make_codec
from stratagem.common.job import JobSpec


class CodedMixing:
    """x_i <- x_i + γ Σ_j w_ij (copy_j - copy_i), after copy_j += decode(encode(x_j - copy_j))."""

    def __init__(self, job: JobSpec, models: Sequence[nn.Module], numerics: int) -> None:
        assert job.compression is not None
        named = [(n, p) for n, p in models[0].named_parameters() if p.requires_grad]
        layout = tuple(TensorLayout(name, tuple(param.shape)) for name, param in named)
        self._codec = make_codec(
            job.compression, layout, job.seed, with_feedback=False, numerics=numerics
        )
        self._seed = job.seed if job.compression.seed is None else job.compression.seed
        self._gamma = job.compression.consensus_step
        self._copies: list[list[Tensor]] = [
            [param.detach().clone() for param in model.parameters() if param.requires_grad]
            for model in models
        ]
        self._states: list[State] = [self._codec.initial_state() for _ in models]

    @torch.no_grad()
    def mix(
        self,
        step: int,
        params: Sequence[Sequence[nn.Parameter]],
        weights: Sequence[Mapping[int, float]],
    ) -> None:
        """step counts from 1."""
        for node, own in enumerate(params):
            key = derive(self._seed, step, node)
            moves = [
                (param - copy).reshape(-1).numpy()
                for param, copy in zip(own, self._copies[node], strict=True)
            ]
            payload, self._states[node] = self._codec.encode(moves, self._states[node], key)
            for copy, move in zip(
                self._copies[node], self._codec.decode(payload, key), strict=True
            ):
                copy.add_(torch.from_numpy(move).view(copy.shape))
        for node, own in enumerate(params):
            for place, param in enumerate(own):
                mine = self._copies[node][place].double()
                pull = torch.zeros_like(mine)
                for j, weight in weights[node].items():
                    if j != node:
                        pull += weight * (self._copies[j][place].double() - mine)
                param.copy_(param.double() + self._gamma * pull)
