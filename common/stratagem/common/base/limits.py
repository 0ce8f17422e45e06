"""Whether limits on the size of a job are checked: at submit, and not for what was accepted once.

A limit guards against who asks for too much. A journal holds jobs that were accepted under the
limits of their time; a coordinator that has others now must be able to read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_are_checked: ContextVar[bool] = ContextVar("limits are checked", default=True)


def are_checked() -> bool:
    """Whether what is read now may be refused for its size."""
    return _are_checked.get()


@contextmanager
def lifted() -> Iterator[None]:
    """What is read inside the block was accepted before. Await nothing in it."""
    token = _are_checked.set(False)
    try:
        yield
    finally:
        _are_checked.reset(token)
