"""A failure inside a group of tasks is no wish to end, nor is such a wish lost in a failure."""

import asyncio

import pytest

from stratagem.coordinator.runtime.supervisor import stop_if_cancelled, task_group


async def fail() -> None:
    raise ValueError("told")


async def failing(waits: bool) -> None:
    async with task_group() as group:
        group.create_task(fail())
        if waits:
            await asyncio.Event().wait()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_failure_leaves_no_cancellation_behind(waits: bool) -> None:
    for _ in range(3):
        with pytest.raises(ExceptionGroup) as raised:
            await failing(waits)
        assert [str(each) for each in raised.value.exceptions] == ["told"]
        stop_if_cancelled()


async def test_a_result_is_returned_though_the_group_is_left_by_it() -> None:
    async def seven() -> int:
        async with task_group() as group:
            group.create_task(asyncio.sleep(0))
            return 7

    assert await seven() == 7


@pytest.mark.parametrize("waits", [False, True])
async def test_a_cancellation_that_meets_a_failure_is_not_lost(waits: bool) -> None:
    begun = asyncio.Event()

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("told")

    async def persist() -> None:
        try:
            async with task_group() as group:
                group.create_task(fail_when_cancelled())
                begun.set()
                if waits:
                    await asyncio.Event().wait()
        except* ValueError:
            pass
        stop_if_cancelled()
        raise AssertionError("went on")

    task = asyncio.create_task(persist())
    await begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
