"""Errors that are kept keep their words, and nothing of the frames that they have come through."""

from collections.abc import Iterator

from stratagem.common.base.exception_frames import without_frames


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


def test_errors_in_a_ring_are_left_once_each() -> None:
    one, two = KeyError("one"), KeyError("two")
    one.__context__, two.__context__ = two, one
    assert without_frames(one) is one
    assert two.__context__ is one
