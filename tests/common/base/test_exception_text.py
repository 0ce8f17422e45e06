"""Nobody is told of an exception group."""

import asyncio

import pytest

from stratagem.common.base.errors import NotFoundError, UnavailableError
from stratagem.common.base.exception_text import leaves, led_to, sole, told


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


def test_others_have_their_type_and_several_are_all_told() -> None:
    group = ExceptionGroup(
        "g", [ValueError("odd"), ExceptionGroup("h", [UnavailableError("gone")])]
    )
    assert told(group) == "ValueError: odd; gone"
    assert sole(group) is group
    assert [type(each) for each in leaves(group)] == [ValueError, UnavailableError]


def test_an_error_without_words_has_its_name() -> None:
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
