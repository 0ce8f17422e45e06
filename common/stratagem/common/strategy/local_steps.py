"""Training with few exchanges: replicas take local steps, and an outer optimizer joins what they
have learned (local SGD, https://arxiv.org/abs/1805.09767; DiLoCo, https://arxiv.org/abs/2311.08105).

Each replica has parameters and an optimizer of its own. After every `local_steps` steps the mean
over the replicas of (common parameters - own parameters) is the gradient of the outer optimizer,
which moves the common parameters; all replicas go on from there. Owns the settings of that, and
what they say about a step. Does not know how it is carried out.
"""

from typing import Annotated, Final, TypeAlias

from pydantic import Field

from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.field_types import Positive, ZeroToBelowOne


class MeanOfReplicas(DocumentValue, tag="name", name="mean", is_extras=True):
    """The common parameters become the mean of the replicas': local SGD."""


class Nesterov(DocumentValue, tag="name", name="nesterov", is_extras=True):
    """SGD with Nesterov momentum: DiLoCo."""

    lr: Positive = 0.7
    momentum: ZeroToBelowOne = 0.9


OuterOptimizer: TypeAlias = MeanOfReplicas | Nesterov
OuterField: TypeAlias = Annotated[OuterOptimizer, Field(discriminator="name")]


DEFAULT_OUTER: Final = Nesterov()
"""Of a job that names none."""


def is_outer_step(step: int, local_steps: int, num_steps: int) -> bool:
    """Return whether the replicas are joined after `step` steps: after every `local_steps`, and
    after the last one of the run."""
    return step % local_steps == 0 or step == num_steps
