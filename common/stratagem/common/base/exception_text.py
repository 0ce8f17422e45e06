"""Describes exceptions in words for people, without the exception groups around them.

A task group wraps what its tasks raise, and nested groups wrap that again; "unhandled errors in a
TaskGroup (1 sub-exception)" says nothing to anybody. Whoever makes a reason, a log line or a status
of an exception that may have come out of tasks asks here.
"""

from collections.abc import Iterator

from stratagem.common.base.errors import StratagemError


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions themselves, without the groups around them, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for exception in error.exceptions for leaf in leaves(exception)]
    return [error]


def sole(error: BaseException) -> BaseException:
    """The exception that a group is about; a group of several that differ stays as it is."""
    causes = leaves(error)
    same = {(type(leaf), str(leaf)) for leaf in causes}
    return causes[0] if len(same) == 1 else error


def led_to(error: BaseException, *, by_handling: bool = True) -> Iterator[BaseException]:
    """Yield the error, and then those that it was raised from, each once: one that is raised from
    itself, or from what it has caused, leads round in a circle.

    by_handling: also those during whose handling one was raised.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        yield behind
        behind = behind.__cause__ or (behind.__context__ if by_handling else None)


def told(error: BaseException) -> str:
    """Describe an exception in words, each once: our own errors by their sentence, others with
    their type."""
    return "; ".join(dict.fromkeys(_words(leaf) for leaf in leaves(error)))


def _words(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, StratagemError) and text:
        return text
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name
