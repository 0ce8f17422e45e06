"""The names that a job may give a pipeline's schedule; schedules.py makes them.

Interleaving is no name: it follows where a worker owns several stages.
"""

from typing import Final

SCHEDULE_NAMES: Final = ("1f1b", "eager", "gpipe", "zero_bubble")
