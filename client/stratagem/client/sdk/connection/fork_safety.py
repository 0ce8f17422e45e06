"""Forks of a process in which a client is open: gRPC's threads are not in them, so every call there
would never end. They get an error at once, and disturb nothing of the process they come from."""

import os
from typing import Final
from weakref import WeakSet

from stratagem.common.base.errors import WrongStateError

_open: Final[WeakSet[object]] = WeakSet()
"""Connections of this process."""
_parent: int | None = None
"""The process of which this one is a fork, if connections were open in it."""


def note_open(connection: object) -> None:
    """A connection of this process begins. Raises WrongStateError in a fork that can have none."""
    check_fork()
    _open.add(connection)


def note_closed(connection: object) -> None:
    _open.discard(connection)


def is_lost() -> bool:
    """Return whether this process is a fork of one in which a client was open."""
    return _parent is not None


def check_fork() -> None:
    """Raises WrongStateError where is_lost."""
    if is_lost():
        raise WrongStateError(
            f"this process is a fork of process {_parent}, in which a client of Stratagem was open,"
            " and gRPC does not work in such a fork: fork before a client is opened, or start "
            "processes with multiprocessing's spawn or forkserver"
        )


def _in_child() -> None:
    global _parent
    if _open:
        _parent = os.getppid()
        _open.clear()


os.register_at_fork(after_in_child=_in_child)
