"""Refuses the settings of a job's execution that this worker does not carry out."""

from collections.abc import Mapping
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.job import ExecutionSpec
from stratagem.common.schema.document import refuse

_SUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "parallelism": ("None",),
}


def check_supported(execution: ExecutionSpec) -> None:
    """Raise InvalidInputError that names every setting which this worker does not carry out."""
    refuse(
        [
            Violation(
                f"execution.{name}",
                f"{getattr(execution, name)} is not carried out by this worker; "
                f"it does {', '.join(getattr(value, '__name__', str(value)) for value in values)}",
            )
            for name, values in _SUPPORTED.items()
            if not {getattr(execution, name), type(getattr(execution, name))} & {*values}
        ]
    )
