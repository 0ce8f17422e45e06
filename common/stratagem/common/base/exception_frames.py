"""Exceptions that are kept by what they have ended: a task, a call or a plan."""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Remove the frames from an error, from the errors that led to it, and from the parts of a
    group, and return it.

    Where one of the frames has what keeps the error, the references form a circle: nothing in these
    frames would be freed until Python's collector looks at them, nor the memory that their objects
    hold outside of Python.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return error
