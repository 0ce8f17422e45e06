"""The values that facts are built from: the strict base record, members, capabilities, metrics and
rejection causes.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.schema.json import check_json, frozen

# ---- Values ----

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Metrics = Mapping[str, Number]
"""Metrics by name. A value may be NaN or infinite; null, which earlier journals hold for both, is
read as NaN."""


def _plain(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values, frozen. Raise for a number that is not finite: JSON has no such number,
    and a text in its place would still be a text after a replay of the journal."""
    with suppress(TypeError):  # pydantic reports types that it does not know
        try:
            json.dumps(values, allow_nan=False)
        except ValueError:
            check_json(values)  # says where
    return frozen(values)


PlainValues = Annotated[Mapping[str, Any], AfterValidator(_plain)]
"""Immutable JSON values by name, which a strategy's run value may share with the fact."""


class Value(BaseModel):
    """A frozen, strict record; hashable if its fields are. NaN and infinity, which JSON lacks, are
    written as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; changed fields are validated as in a new record."""
        if not update:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **update})


class Member(Value):
    """One process of a worker: the worker's name, and the incarnation, unique to the process."""

    worker_id: WorkerId
    incarnation: Incarnation


class Capability(Value):
    """The hardware, numerics, data and tags that a worker offers; see stratagem.v1.Capability."""

    device: str = "cpu"
    device_name: str = ""
    memory_bytes: int = 0
    num_threads: int = 1
    numerics_fingerprint: str = ""
    numerics_description: str = ""
    local_data: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    data_plane: str = ""
    code_policy: str = ""
    tunnelled: bool = False
    ephemeral: bool = False
    keeps_nothing: bool = False
    writes_states: bool = False
    numerics_rules: int = 0
    takes_signed_requests: bool = False


class Setting(Value):
    """The hyperparameters of a member of a population from a step on."""

    from_step: int
    values: PlainValues


TRAIN_LOSS = "train.loss"
"""Metric: the mean training loss of a segment or a round."""
SKIPPED_STEPS = "train.skipped_steps"
"""Metric: steps skipped because their loss or gradients were not finite. For a finished or
committed segment it counts the run's skipped steps so far, each once even if it was trained
repeatedly."""


class ErrorRecord(Value):
    """An exception raised by the user's code, and where it was raised."""

    type: str
    message: str
    traceback: str
    worker_id: str
    activity: str
    opens_in_s: float = 0.0
    """Seconds until a closed site opens; 0: not known."""


# ---- Rejection causes ----


class Cause(StrEnum):
    """The reason category for which a federated client's update does not count; low-cardinality, as
    causes label a metric."""

    NOT_FINITE = "not_finite"
    """Values of the update are not finite, or it is empty because every step was skipped."""
    NOT_FINITE_LOSS = "not_finite_loss"
    """The loss of a step, or a gradient, is not finite."""
    LAYOUT = "layout"
    """Tensor names, shapes, types or aliases differ from those of the run's model."""
    SIZE = "size"
    """The update has more bytes than were announced, or than the model has."""
    CODEC = "codec"
    """The update cannot be decoded, or its codec cannot represent it."""
    NUM_SAMPLES = "num_samples"
    EXCEPTION = "exception"
    """The client's data or code raised an exception."""
    MEMORY = "memory"
    CRASHED = "crashed"
    """One worker process after another has ended while it trained the client."""
    TIMEOUT = "timeout"
    """The client's data or code raised TimeoutError."""
    REFUSED_BY_SITE = "refused_by_site"
    """The client's worker does not allow an entry point that the job names."""
    OUTSIDE_WINDOW = "outside_window"
    """The client's site takes part at certain times only, and not now: no failure."""
    BUDGET = "budget"
    """The privacy budget of the client's rows is spent: no failure."""
    KEYS_LOST = "keys_lost"
    """The client no longer has its keys of a secure round: its worker was restarted."""
    ABSENT = "absent"
    """The client's worker was absent when the keys of a secure round were exchanged."""
    LATE = "late"
    """The round was closed without the client; never journaled."""
    UNKNOWN = "unknown"
    """No cause is recorded: the fact was journaled by a version that had none."""

    @property
    def is_of_the_job(self) -> bool:
        """Return True if another run of the job would fail in the same way, on any machine."""
        machines = (
            *(Cause.MEMORY, Cause.CRASHED, Cause.TIMEOUT),
            *(Cause.KEYS_LOST, Cause.ABSENT),
        )
        return self not in machines and self is not Cause.OUTSIDE_WINDOW

    @property
    def is_refusal(self) -> bool:
        """Return True if the client's site refused, which may change later."""
        return self in (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW)

    @property
    def is_fault(self) -> bool:
        """Return True if the client's data, code or machine has failed; False if the client refused
        or was late, or if nothing is known."""
        unwilling = (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW, Cause.BUDGET)
        no_fault = (*unwilling, Cause.KEYS_LOST, Cause.ABSENT)
        return self not in (*no_fault, Cause.LATE, Cause.UNKNOWN)
