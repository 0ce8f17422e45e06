"""What the code does against the rules of the house today: a list that may only shrink.

Each test that reads one of these fails where an entry is no longer needed.
"""

FOLDERS_IN_CIRCLES: frozenset[str] = frozenset({})
"""Folders whose modules import those of a folder that, over others, imports theirs."""

MODULES_IN_FOLDERS: dict[str, int] = {}
"""Folders with too many modules, and the number that they may have at most."""

LOOSE_MODULES: frozenset[str] = frozenset({})
"""Modules at the root of a package, which belong into a folder."""

IMPURE_IMPORTS: frozenset[tuple[str, str]] = frozenset()
"""A module that the core reaches, and what it imports."""

UNUSED_NAMES: frozenset[str] = frozenset()
"""Public names that nobody uses but a test."""

CLASS_NAMES: dict[str, int] = {"DataParallel": 2, "ModelParallel": 2}
"""Names of several classes, and of how many at most: these stand in the text of jobs, under
`strategy` and under `execution.parallelism`."""
