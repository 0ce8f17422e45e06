"""Nobody is told of an exception group, and errors that are kept keep nothing of their frames."""

import asyncio
from collections.abc import Iterator

import pytest

from stratagem.common.base.errors import (
    NotFoundError,
    UnavailableError,
    leaves,
    led_to,
    sole,
    told,
    without_frames,
)


def nested() -> BaseExceptionGroup[Exception]:
    async def fail(error: Exception) -> None:
        raise error

    async def both() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(fail(NotFoundError("blob 1 is not in the store")))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(fail(NotFoundError("blob 1 is not in the store")))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(both())
    return caught.value


def test_what_tasks_have_raised_is_told_once_and_without_the_groups() -> None:
    error = nested()
    assert "TaskGroup" in str(error)
    assert told(error) == "blob 1 is not in the store"
    assert isinstance(sole(error), NotFoundError)


def test_others_have_their_type_or_name_and_several_are_all_told() -> None:
    group = ExceptionGroup(
        "g", [ValueError("odd"), ExceptionGroup("h", [UnavailableError("gone")])]
    )
    assert told(group) == "ValueError: odd; gone"
    assert sole(group) is group
    assert [type(each) for each in leaves(group)] == [ValueError, UnavailableError]
    assert (told(KeyError()), told(TimeoutError())) == ("KeyError", "TimeoutError")
    plain = ValueError("x")
    assert sole(plain) is plain


def test_causes_that_lead_round_in_a_circle_come_to_an_end() -> None:
    first, second = KeyError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert list(led_to(first)) == [first, second]
    assert list(led_to(second)) == [second, first]
    assert list(led_to(second, by_handling=False)) == [second]
    itself = RuntimeError("of the user's, raised from itself")
    itself.__cause__ = itself
    assert list(led_to(itself)) == [itself]


def fail_with_parts() -> None:
    try:
        raise KeyError("first")
    except KeyError as first:
        try:
            raise ValueError("of a task")
        except ValueError as of_task:
            raise ExceptionGroup("tasks", [of_task]) from first


def with_all(error: BaseException | None) -> Iterator[BaseException]:
    if error is not None:
        yield error
        yield from with_all(error.__cause__)
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from with_all(each)


def test_an_error_keeps_its_cause_and_parts_and_no_frame() -> None:
    try:
        fail_with_parts()
    except ExceptionGroup as error:
        kept = error
    assert all(each.__traceback__ is not None for each in with_all(kept))
    assert without_frames(kept) is kept
    assert [repr(each) for each in with_all(kept)] == [
        "ExceptionGroup('tasks', [ValueError('of a task')])",
        "KeyError('first')",
        "ValueError('of a task')",
    ]
    assert all(each.__traceback__ is None for each in with_all(kept))
    one, two = KeyError("one"), KeyError("two")
    one.__context__, two.__context__ = two, one
    assert without_frames(one) is one
    assert two.__context__ is one
