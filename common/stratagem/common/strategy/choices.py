"""The choices inside a training strategy: aggregation, placement, selection, evolution.

Every class is frozen and checks its own ranges when it is made. Each kind of choice is a union;
a reader meets its members with `match` and `assert_never`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from stratagem.common.base.ids import WorkerId
from stratagem.common.schema.field_rules import (
    AT_LEAST_1,
    FRACTION,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    ZERO_TO_BELOW_1,
    ZERO_TO_ONE,
    FieldRule,
    check_fields,
    must,
)

_TOPOLOGY: Final = re.compile(
    r"ring|complete|star|torus(:[1-9]\d{0,5}x[1-9]\d{0,5})?|hypercube|exponential|random:[1-9]\d{0,5}"
)
KNOWN_TOPOLOGIES: Final = "ring, complete, star, torus, torus:RxC, hypercube, exponential, random:K"
_IS_TOPOLOGY: Final = FieldRule(
    lambda value: isinstance(value, str) and _TOPOLOGY.fullmatch(value) is not None,
    f"known topologies: {KNOWN_TOPOLOGIES}",
)

# How the gradients of replicas are combined.


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The replicas sum their gradients among themselves."""


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """The coordinator sums the gradients; the replicas apply the sum."""


@dataclass(frozen=True, slots=True)
class Decentralized:
    """Gossip: each replica averages its parameters with its neighbours in the topology."""

    topology: str = field(metadata=must(_IS_TOPOLOGY))

    def __post_init__(self) -> None:
        check_fields(self)


GradientAggregation: TypeAlias = AllReduce | ParameterServer | Decentralized


# Where the parts of a model go, and how activations travel between them.


@dataclass(frozen=True, slots=True)
class Tag:
    """Any worker that carries this tag."""

    tag: str = field(metadata=must(NOT_EMPTY))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class WorkerIdTarget:
    """The target of the one worker that it names."""

    worker_id: WorkerId = field(metadata=must(NOT_EMPTY))

    def __post_init__(self) -> None:
        check_fields(self)


RemoteTarget: TypeAlias = Tag | WorkerIdTarget


@dataclass(frozen=True, slots=True)
class Partition:
    """The nodes of the model that one worker owns."""

    node_ids: tuple[str, ...] = field(metadata=must(NOT_EMPTY))
    target: RemoteTarget

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DataStore:
    """Activations travel through the shared object store."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Activations are streamed from worker to worker."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Activations are streamed as with Direct, with several micro-batches of this many rows in
    flight."""

    micro_batch_size: int = field(metadata=must(AT_LEAST_1))

    def __post_init__(self) -> None:
        check_fields(self)


CommunicationProtocol: TypeAlias = DataStore | Direct | Pipeline


# How the updates of clients become the next global model, and which clients take part.


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Mean of the clients' models weighted by samples (https://arxiv.org/abs/1602.05629)."""


@dataclass(frozen=True, slots=True)
class FedProx:
    """FedAvg with mu/2 · ‖w − w_global‖² in each client's loss (https://arxiv.org/abs/1812.06127)."""

    mu: float = field(metadata=must(NOT_NEGATIVE))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FedYogi:
    """Adaptive server optimizer (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    beta1: float = field(metadata=must(ZERO_TO_BELOW_1))
    beta2: float = field(metadata=must(ZERO_TO_BELOW_1))
    tau: float = field(metadata=must(POSITIVE))

    def __post_init__(self) -> None:
        check_fields(self)


FederatedAggregation: TypeAlias = FedAvg | FedProx | FedYogi


# What becomes of an update that comes when its round is closed; in the options.


@dataclass(frozen=True, slots=True)
class Discount:
    """A late update enters a later round with weight n · discount^staleness (arXiv:1903.03934,
    2106.06639)."""

    discount: float = field(metadata=must(FRACTION))

    def __post_init__(self) -> None:
        check_fields(self)


# Server optimizers that the shared form has no name for; they stand in the options.


@dataclass(frozen=True, slots=True)
class FedAdam:
    """Adam on the server (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    learning_rate: float = field(default=0.1, metadata=must(POSITIVE))
    beta1: float = field(default=0.9, metadata=must(ZERO_TO_BELOW_1))
    beta2: float = field(default=0.99, metadata=must(ZERO_TO_BELOW_1))
    tau: float = field(default=0.001, metadata=must(POSITIVE))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FedAdagrad:
    """Adagrad on the server (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    learning_rate: float = field(default=0.1, metadata=must(POSITIVE))
    tau: float = field(default=0.001, metadata=must(POSITIVE))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FedAvgM:
    """Momentum on the server (https://arxiv.org/abs/1909.06335)."""

    learning_rate: float = field(default=1.0, metadata=must(POSITIVE))
    momentum: float = field(default=0.9, metadata=must(ZERO_TO_BELOW_1))

    def __post_init__(self) -> None:
        check_fields(self)


ServerOptimizer: TypeAlias = FedAdam | FedAdagrad | FedAvgM


@dataclass(frozen=True, slots=True)
class All:
    """Every client takes part in every round."""


@dataclass(frozen=True, slots=True)
class Random:
    """A seeded random share of the clients takes part in a round."""

    fraction: float = field(metadata=must(FRACTION))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ByCapability:
    """The clients that carry all of these tags; no tags = all clients."""

    required_tags: tuple[str, ...]


ClientSelection: TypeAlias = All | Random | ByCapability


# How a population evolves.


@dataclass(frozen=True, slots=True)
class Truncation:
    """The worst fraction copies members of the best fraction."""

    fraction: float = field(metadata=must(FRACTION))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Binary:
    """A member copies a random other one that is better by more than the threshold."""

    threshold: float = field(metadata=must(NOT_NEGATIVE))

    def __post_init__(self) -> None:
        check_fields(self)


ExploitStrategy: TypeAlias = Truncation | Binary


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Each hyperparameter is multiplied by a random factor in [1 − factor, 1 + factor]."""

    factor: float = field(metadata=must(ZERO_TO_ONE))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Resample:
    """Each hyperparameter is drawn again from the search space."""


ExploreStrategy: TypeAlias = Perturbation | Resample
