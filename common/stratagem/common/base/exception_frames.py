"""Exceptions that are kept after they were raised: by the task or the call that they have ended."""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Return the error without the frames that it has come through, its own and of the one before.

    Where what keeps the error is in one of them, that is a circle: nothing in these frames would be
    freed until Python's collector looks at them, nor the memory that their objects hold outside of
    Python.
    """
    error.__context__ = None
    return error.with_traceback(None)
