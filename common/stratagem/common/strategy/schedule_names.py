"""The names that a job may give a pipeline's schedule; schedules.py makes them.

Interleaving is no name: it follows where a worker owns several stages.
"""

from typing import Final, Literal, TypeAlias, get_args

AUTO: Final = "auto"
"""1f1b, or eager where hops are slow; see `schedules.suited`."""
ScheduleName: TypeAlias = Literal["auto", "1f1b", "eager", "gpipe", "zero_bubble"]
SCHEDULE_NAMES: Final[tuple[str, ...]] = get_args(ScheduleName)
