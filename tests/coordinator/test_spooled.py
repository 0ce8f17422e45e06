"""Updates in the spool when their run is over, or goes back: its next life meets none of them."""

import asyncio
from pathlib import Path

from tests.coordinator.core.simulation import RUN
from tests.coordinator.open_gate import leading
from tests.coordinator.spooled_run import submit
from tests.programs import run

BEGIN_AND_DELETE = """
import asyncio
from tests.coordinator.spooled_run import begin_and_delete
asyncio.run(begin_and_delete(Path(sys.argv[1])))
"""


async def test_a_run_meets_nothing_of_one_of_its_id_whose_deletion_was_interrupted(
    tmp_path: Path,
) -> None:
    armed = tmp_path / "coordinator.spool.before_delete"
    armed.touch()
    data = tmp_path / "data"
    assert run(BEGIN_AND_DELETE, data, failpoints=tmp_path)[0] == 137
    assert list((data / "spool").rglob("*.json")), "the update is left"
    assert list((data / "logs").iterdir())
    async with leading(data) as app:
        key = await submit(app)
        assert app.spool.look(key) == (None, 0)
        tail = app.logs.tail(RUN, follow=False, is_over=app.is_over)
        lines = [line.text async for _, line in tail]
        assert not any("deleted" in text or "stopped" in text for text in lines)
        while app._chores._tasks:
            await asyncio.wait(app._chores._tasks)
        assert not list((data / "spool").rglob("*.json"))
        assert app.spool.used_bytes == 0
