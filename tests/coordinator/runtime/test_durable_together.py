"""Those who become durable at about the same time go on in one turn of the event loop."""

import asyncio

import pytest

from stratagem.coordinator.runtime import supervisor
from stratagem.coordinator.runtime.supervisor import Together
from tests.patience import PATIENCE_S


class Writers:
    """Tasks that write until they are let go, and note when they report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.together, self.reported = Together(), list[str]()
        self._clock_s = 0.0
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        monkeypatch.setattr(supervisor, "LONGEST_WAIT_S", PATIENCE_S)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", self._time)

    @classmethod
    async def of_two(cls, monkeypatch: pytest.MonkeyPatch) -> "Writers":
        """With a and b under way."""
        made = cls(monkeypatch)
        for name in ("a", "b"):
            await made.begin(name)
        return made

    def _time(self) -> float:
        return self._clock_s

    def pass_s(self, seconds: float) -> None:
        self._clock_s += seconds

    async def begin(self, name: str, key: object = "round 1") -> None:
        self._gates[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._write(name, key))
        await turns()

    async def _write(self, name: str, key: object) -> None:
        with self.together.member(key) as writing:
            await self._gates[name].wait()
        await writing.all_done()
        self.reported.append(name)

    async def let_go(self, name: str) -> None:
        self._gates[name].set()
        await turns()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_is_done_waits_for_those_under_way_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers = await Writers.of_two(monkeypatch)
    await writers.begin("other round", key="round 2")
    writers.pass_s(1.0)
    await writers.let_go("a")
    assert writers.reported == []
    await writers.begin("c")  # comes too late for this group
    await writers.let_go("b")
    assert sorted(writers.reported) == ["a", "b"]
    await writers.let_go("c")
    await writers.let_go("other round")
    assert writers.reported[2:] == ["c", "other round"]


async def test_who_fails_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = await Writers.of_two(monkeypatch)
    writers.pass_s(1.0)
    await writers.let_go("a")
    assert writers.reported == []
    await writers.cancel("b")
    assert writers.reported == ["a"]


async def test_the_wait_is_no_longer_than_the_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = await Writers.of_two(monkeypatch)
    writers.pass_s(3.0)
    await writers.let_go("a")
    writers.pass_s(2.0)
    await turns()
    assert writers.reported == []
    writers.pass_s(1.5)
    await turns()
    assert writers.reported == ["a"]
    await writers.let_go("b")
    assert writers.reported == ["a", "b"]
