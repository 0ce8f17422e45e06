"""Keep the public copies of gossip nodes: the state of a node that its neighbours know (CHOCO-SGD).

A node sends its coded move since the last round. The node and all receivers add the decoded move to
their copy, so all copies of a node have the same bits. The part of the move that a payload did not
carry stays in the difference between node and copy and is part of the next move: the copies are the
error feedback (https://arxiv.org/abs/1902.00340). The module knows neither members nor the network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.compression import (
    ByteArray,
    FloatArray,
    NonFiniteError,
    State,
    TensorLayout,
    derive,
    make_codec,
)
from stratagem.common.job import JobSpec
from stratagem.worker.exchange.compressor import Traffic
from stratagem.worker.mesh.staging import to_host

# ---- Distances between nodes ----


@dataclass(slots=True)
class Distances:
    """Squared norms measured for one node i in a round of mixing; x is the value before the round.

    Under a codec x_j is the public copy of node j.
    """

    moved: float = 0.0
    """‖x_i' - x_i‖², the squared distance moved by mixing."""
    apart: float = 0.0
    """Σ_j w_ij ‖x_i - x_j‖², the weighted squared distance to the neighbours."""


def neighbour_distance(distances: Sequence[Distances]) -> float:
    """Return the nodes' root mean square distance to their neighbours before a round of mixing.

    sqrt(Σ_i Σ_j w_ij ‖x_i - x_j‖² / 2n) over n nodes i. Over all N nodes the sum is 2 xᵀ(I - W)x,
    so with the eigenvalues 1 > λ₂ ≥ … ≥ λ_N of the mixing matrix it is between sqrt(1 - λ₂) and
    sqrt(1 - λ_N) times their distance to the mean; of a complete graph it is that distance.
    """
    return math.sqrt(math.fsum(distance.apart for distance in distances) / (2 * len(distances)))


# ---- Public copies ----

PUBLIC: Final = "public/"
_MODEL: Final = "model/"


class PublicCopies:
    """The public copies of this member's nodes and of their neighbours. Used by one thread."""

    def __init__(
        self,
        job: JobSpec,
        params: Sequence[tuple[str, nn.Parameter]],
        own: Sequence[int],
        weights: Sequence[Mapping[int, float]],
        numerics: int,
    ) -> None:
        """Begin without copies. params: the parameters of any node, for their shapes. weights: for
        each node, the mixing weights of its neighbours and of itself."""
        spec = job.compression
        assert spec is not None
        self._layout = tuple(TensorLayout(name, tuple(p.shape)) for name, p in params)
        self._codec = make_codec(
            spec, self._layout, job.seed, with_feedback=False, numerics=numerics
        )
        self._seed = job.seed if spec.seed is None else spec.seed
        self._own_nodes = own
        self.name, self.step_size = spec.codec, spec.consensus_step
        self.payload_bytes = self._codec.payload_bytes
        self.raw_bytes = sum(tensor.raw_bytes for tensor in self._layout)
        self.traffic = Traffic()
        self.nodes = sorted({*own, *(j for node in own for j in weights[node])})
        self._copies: dict[int, list[FloatArray]] = {}
        self._states: dict[int, State] = {}

    def encode(self, node: int, step: int, tensors: Sequence[Tensor]) -> Tensor:
        """Return the coded move of one of this member's nodes in a step (uint8)."""
        moves = [x - copy for x, copy in zip(_flats(tensors), self._copies[node], strict=True)]
        try:
            payload, self._states[node] = self._codec.encode(
                moves, self._states[node], derive(self._seed, step, node)
            )
        except NonFiniteError as error:
            raise UserCodeError(
                "FloatingPointError",
                f"non-finite parameter {error.name} at step {step}",
                activity=f"training step {step}",
            ) from None
        return torch.from_numpy(payload)

    def advance(self, node: int, step: int, payload: Tensor) -> None:
        """Add a node's decoded move to its public copy; every member with a copy does so."""
        data: ByteArray = to_host(payload).wait().numpy()
        decoded = self._codec.decode(data, derive(self._seed, step, node))
        copies = self._copies[node]
        self._copies[node] = [c + move for c, move in zip(copies, decoded, strict=True)]

    def mix(self, node: int, weights: Mapping[int, float], tensors: Sequence[Tensor]) -> Distances:
        """Mix x_i <- x_i + γ Σ_j w_ij (copy_j - copy_i), in place; distances are of the copies.

        Products and sums are float64, in order of j, rounded once.
        """
        distances = Distances()
        for place, (tensor, values) in enumerate(zip(tensors, _flats(tensors), strict=True)):
            copy = self._copies[node][place].astype(np.float64)
            pull = np.zeros_like(copy)
            for j, weight in weights.items():
                if j != node:
                    away = self._copies[j][place] - copy
                    distances.apart += weight * float(np.add.reduce(away * away))
                    pull += weight * away
            pull *= self.step_size
            distances.moved += float(np.add.reduce(pull * pull))
            moved = (values.astype(np.float64) + pull).astype(np.float32)
            tensor.copy_(torch.from_numpy(moved).view(tensor.shape))
        return distances

    def state(self, node: int) -> dict[str, Tensor]:
        """Return a local node's state, by `public/<parameter>` and the codec's names."""
        copies = {
            f"{PUBLIC}{spec.name}": torch.from_numpy(copy)
            for spec, copy in zip(self._layout, self._copies[node], strict=True)
        }
        codec_state = {name: torch.from_numpy(value) for name, value in self._states[node].items()}
        return {**copies, **codec_state}

    def load(self, node: int, tensors: Mapping[str, Tensor]) -> None:
        """Load a node's public copies; copies that the state lacks begin as the node's model."""
        self._copies[node] = [
            _array(f"{PUBLIC}{spec.name}", spec.numel, tensors)
            if f"{PUBLIC}{spec.name}" in tensors
            else _array(f"{_MODEL}{spec.name}", spec.numel, tensors)
            for spec in self._layout
        ]
        initial = self._codec.initial_state()
        if node in self._own_nodes:
            self._states[node] = {
                name: _array(name, value.size, tensors) if name in tensors else value
                for name, value in initial.items()
            }

    def count(self, num_payloads: int) -> None:
        self.traffic.sent_bytes += num_payloads * self.payload_bytes
        self.traffic.uncompressed_bytes += num_payloads * self.raw_bytes

    def take_traffic(self) -> Traffic:
        """Return the bytes sent since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic


def _flats(tensors: Sequence[Tensor]) -> list[FloatArray]:
    copies = [to_host(tensor.detach().reshape(-1)) for tensor in tensors]
    return [copy.wait().numpy() for copy in copies]  # all were started before one is read


def _array(name: str, numel: int, tensors: Mapping[str, Tensor]) -> FloatArray:
    stored = tensors.get(name)
    if stored is None or stored.numel() != numel:
        raise InvalidInputError.at(f"state.{name}", f"needs {numel} elements")
    values: FloatArray = stored.detach().to("cpu", torch.float32, copy=True).reshape(-1).numpy()
    return values
