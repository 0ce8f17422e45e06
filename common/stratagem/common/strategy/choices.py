"""This module defines the choices inside a training strategy: aggregation, placement, selection,
evolution.

Every class is frozen and checks its own ranges when it is made. Each kind of choice is a union; a
reader meets its members with `match` and `assert_never`.
"""

import math
import re
from typing import Annotated, Final, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import WorkerId
from stratagem.common.schema.document import (
    DocumentValue,
    Items,
    NonEmptyItems,
    NonEmptyText,
    NotNegative,
    OneKey,
    Positive,
    Share,
    SharedCount,
    ZeroToBelowOne,
    ZeroToOne,
)

# ---- Choices ----

_TOPOLOGY: Final = re.compile(
    r"ring|complete|star|torus(:[1-9]\d{0,5}x[1-9]\d{0,5})?|hypercube|exponential|random:[1-9]\d{0,5}"
)
KNOWN_TOPOLOGIES: Final = "ring, complete, star, torus, torus:RxC, hypercube, exponential, random:K"


def _check_topology(value: str) -> str:
    if not _TOPOLOGY.fullmatch(value):
        raise InvalidInputError(f"{value!r} is not allowed; known topologies: {KNOWN_TOPOLOGIES}")
    return value


# How the gradients of replicas are combined.


class AllReduce(DocumentValue, tag="method"):
    """The replicas sum their gradients among themselves."""


class ParameterServer(DocumentValue, tag="method"):
    """The coordinator sums the gradients; the replicas apply the sum."""


class Decentralized(DocumentValue, tag="method"):
    """Gossip: each replica averages its parameters with its neighbours in the topology."""

    topology: Annotated[str, AfterValidator(_check_topology), Field(examples=["ring"])]


GradientAggregation: TypeAlias = AllReduce | ParameterServer | Decentralized


# Where the parts of a model go, and how activations travel between them.


class Tag(DocumentValue):
    """The placement on any worker that carries this tag."""

    tag: NonEmptyText


class WorkerIdTarget(DocumentValue):
    """The placement on the worker with this id."""

    worker_id: Annotated[WorkerId, Field(min_length=1)]


RemoteTarget: TypeAlias = Tag | WorkerIdTarget
TARGET: Final = OneKey({"Tag": Tag, "WorkerId": WorkerIdTarget})


class Partition(DocumentValue):
    """The nodes of the model that one worker owns."""

    node_ids: Annotated[NonEmptyItems[str], Field(examples=[["0", "1"]])]
    target: Annotated[RemoteTarget, TARGET, Field(examples=[{"WorkerId": "worker-0"}])]


class DataStore(DocumentValue, tag="protocol"):
    """Activations travel through the shared object store."""


class Direct(DocumentValue, tag="protocol"):
    """Activations are streamed from worker to worker."""


class Pipeline(DocumentValue, tag="protocol"):
    """Activations are streamed as with Direct, in micro-batches of this many rows, several of which
    are in flight."""

    micro_batch_size: Annotated[SharedCount, Field(examples=[8])]


CommunicationProtocol: TypeAlias = DataStore | Direct | Pipeline


# How the updates of clients become the next global model, and which clients take part.


class FedAvg(DocumentValue, tag="method"):
    """Mean of the clients' models weighted by samples (https://arxiv.org/abs/1602.05629)."""


class FedProx(DocumentValue, tag="method"):
    """FedAvg with mu/2 · ‖w − w_global‖² in each client's loss (https://arxiv.org/abs/1812.06127)."""

    mu: Annotated[NotNegative, Field(examples=[0.01])]


class FedYogi(DocumentValue, tag="method"):
    """Adaptive server optimizer (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    beta1: Annotated[ZeroToBelowOne, Field(examples=[0.9])]
    beta2: Annotated[ZeroToBelowOne, Field(examples=[0.99])]
    tau: Annotated[Positive, Field(examples=[0.001])]


FederatedAggregation: TypeAlias = FedAvg | FedProx | FedYogi


# What becomes of an update that comes when its round is closed; in the options.


class Discount(DocumentValue):
    """The discount of late updates: an update that enters a later round has the weight n ·
    discount^staleness (arXiv:1903.03934, 2106.06639)."""

    discount: Share


# Server optimizers that the shared form has no name for; they stand in the options.


class FedAdam(DocumentValue, tag="name", name="fedadam", is_extras=True):
    """Adam on the server (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    learning_rate: Positive = 0.1
    beta1: ZeroToBelowOne = 0.9
    beta2: ZeroToBelowOne = 0.99
    tau: Positive = 0.001


class FedAdagrad(DocumentValue, tag="name", name="fedadagrad", is_extras=True):
    """Adagrad on the server (https://arxiv.org/abs/2003.00295, Algorithm 2)."""

    learning_rate: Positive = 0.1
    tau: Positive = 0.001


class FedAvgM(DocumentValue, tag="name", name="fedavgm", is_extras=True):
    """Momentum on the server (https://arxiv.org/abs/1909.06335)."""

    learning_rate: Positive = 1.0
    momentum: ZeroToBelowOne = 0.9


ServerOptimizer: TypeAlias = FedAdam | FedAdagrad | FedAvgM


class All(DocumentValue, tag="method"):
    """Every client takes part in every round."""


class Random(DocumentValue, tag="method"):
    """A seeded random share of the clients takes part in a round."""

    fraction: Share


class ByCapability(DocumentValue, tag="method"):
    """Clients that carry all of these tags take part; without tags, all clients."""

    required_tags: Items[str]


def num_drawn(fraction: float, num_clients: int) -> int:
    """Return the number of clients that Random selects for a round out of `num_clients`."""
    return max(1, math.floor(fraction * num_clients + 1e-9))


ClientSelection: TypeAlias = All | Random | ByCapability


# How a population evolves.


class Truncation(DocumentValue, tag="method"):
    """The worst fraction copies members of the best fraction."""

    fraction: Share


class Binary(DocumentValue, tag="method"):
    """A member copies a random other one that is better by more than the threshold."""

    threshold: NotNegative


ExploitStrategy: TypeAlias = Truncation | Binary


class Perturbation(DocumentValue, tag="method"):
    """Each hyperparameter is multiplied by a random factor in [1 − factor, 1 + factor]."""

    factor: Annotated[ZeroToOne, Field(examples=[0.2])]


class Resample(DocumentValue, tag="method"):
    """Each hyperparameter is drawn again from the search space."""


ExploreStrategy: TypeAlias = Perturbation | Resample


# ---- Names of schedules ----
#
# A job may give a pipeline's schedule one of these names; common/pipeline/schedules.py makes
# them. Interleaving has no name: it follows where a worker owns several stages.

AUTO: Final = "auto"
"""The schedule name for 1f1b, or eager if transfers are slow; `schedules.suited` decides."""
ScheduleName: TypeAlias = Literal["auto", "1f1b", "eager", "gpipe", "zero_bubble"]
SCHEDULE_NAMES: Final[tuple[str, ...]] = get_args(ScheduleName)
