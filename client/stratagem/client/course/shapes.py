"""What is read here of events and runs: the SDK's values have these attributes, and more."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class EventLike(Protocol):
    """Something that has happened to a run; see Event of the SDK."""

    @property
    def index(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def sentence(self) -> str: ...
    @property
    def payload(self) -> Mapping[str, Any]: ...


class CommitLike(Protocol):
    """A state in the coordinator's store; see Commit of the SDK."""

    @property
    def segment(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def is_best(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def member(self) -> int | None: ...
    @property
    def hyperparameters(self) -> Mapping[str, Any]: ...


class RunLike(Protocol):
    """The status of a run; see RunStatus of the SDK."""

    @property
    def commits(self) -> Sequence[CommitLike]: ...
    @property
    def job(self) -> Mapping[str, Any]: ...


class SeriesLike(Protocol):
    """Values of one series over the steps of a run; see StepSeries of the SDK."""

    @property
    def step(self) -> NDArray[np.int64]: ...
    @property
    def last(self) -> NDArray[np.float64]: ...
    @property
    def min(self) -> NDArray[np.float64]: ...
    @property
    def max(self) -> NDArray[np.float64]: ...
    @property
    def provisional(self) -> NDArray[np.bool_]: ...
