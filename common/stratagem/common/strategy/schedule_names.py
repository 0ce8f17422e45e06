"""The names that a job may give a pipeline's schedule; schedules.py makes them.

Interleaving is no name: it follows where a worker owns several stages.
"""

from typing import Final

AUTO: Final = "auto"
"""1f1b, or eager where hops are slow; see `schedules.suited`."""
SCHEDULE_NAMES: Final = (AUTO, "1f1b", "eager", "gpipe", "zero_bubble")
