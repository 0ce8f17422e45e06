"""Value types that facts are built from: the strict base record, members, capabilities, metrics."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.schema.json import check_json, frozen

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Metrics = Mapping[str, Number]
"""Metrics by name. A value may be NaN or infinite; null, which earlier journals hold for both, is
read as NaN."""


def _plain(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values, frozen; raise for a number that is not finite: JSON has none, and the text
    that would stand for it would be a text when the journal is replayed."""
    with suppress(TypeError):  # of foreign kinds pydantic says by itself what it does not know
        try:
            json.dumps(values, allow_nan=False)
        except ValueError:
            check_json(values)  # says where
    return frozen(values)


PlainValues = Annotated[Mapping[str, Any], AfterValidator(_plain)]
"""Immutable JSON values by name: the run values of strategies share them with the fact."""


class Value(BaseModel):
    """A frozen, strict record; hashable when its fields are. JSON has no NaN and no infinity: they
    are written as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which what is set is checked as in a new record."""
        if not update:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **update})


class Member(Value):
    """One start of one worker process: the worker's name and its incarnation."""

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
    """Hyperparameters that a member of a population trains with from a step on."""

    from_step: int
    values: PlainValues


TRAIN_LOSS = "train.loss"
"""Metric: the mean training loss of a segment or a round."""
SKIPPED_STEPS = "train.skipped_steps"
"""Metric: steps that were not finite and changed nothing. Of a finished or committed segment: since
the run began, each step of its history once, however often it was trained."""


class ErrorRecord(Value):
    """An exception raised by the user's code, and where it was raised."""

    type: str
    message: str
    traceback: str
    worker_id: str
    activity: str
    opens_in_s: float = 0.0
    """Of a site that is closed: seconds until it opens; 0: not known."""
