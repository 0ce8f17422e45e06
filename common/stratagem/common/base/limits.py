"""Switches the limits on the size of a job: checked at submit, lifted for jobs accepted earlier.

A limit guards against who asks for too much. A journal holds jobs that were accepted under the
limits of their time; a coordinator that has others now must be able to read them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_are_checked: ContextVar[bool] = ContextVar("limits are checked", default=True)


def are_checked() -> bool:
    """Return whether input that is read now may be refused for its size."""
    return _are_checked.get()


@contextmanager
def lifted() -> Iterator[None]:
    """Lift the limits inside the block, for input that was accepted before. Await nothing in it."""
    token = _are_checked.set(False)
    try:
        yield
    finally:
        _are_checked.reset(token)
