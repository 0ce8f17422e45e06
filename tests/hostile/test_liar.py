"""What a worker under somebody else's control gets from its coordinator, and can do to it."""

from pathlib import Path

from stratagem.v1 import worker_pb2 as wpb
from tests.hostile.liar import lied_to, raises, run_to_its_end, says


async def test_a_worker_is_brought_no_blob_that_its_plan_does_not_name(tmp_path: Path) -> None:
    foreign = "f" * 64

    def asks(request: wpb.ExecuteRequest) -> list[wpb.ExecuteResponse]:
        return [says(need_blob=wpb.NeedBlob(digest=foreign)), raises("was told nothing")]

    async with lied_to(tmp_path, asks) as (stub, liar):
        events = await run_to_its_end(stub)
    assert events[-1].kind == "RunFailed"
    assert f"worker liar asks for blob {foreign}, which its plan does not name" in (
        events[-1].sentence
    )
    assert liar.brought == []
