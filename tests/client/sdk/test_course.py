"""What a client tells of the course of a run that goes on, over the wire."""

from stratagem.client import AsyncClient, Client
from stratagem.client.course.members import members
from stratagem.client.course.population import population
from stratagem.client.course.rounds import clients, rounds
from stratagem.common.job import JobSpec
from tests.client.course.recorded import golden, job_of
from tests.client.fake_coordinator import FakeCoordinator


async def test_the_course_of_a_run_is_read_while_it_goes_on(
    fake: FakeCoordinator, address: str
) -> None:
    """Both clients say the same; none of them waits for the end."""
    parts = {name: golden(f"golden-{name}") for name in ("population", "quorum", "killed")}
    for name, events in parts.items():
        fake.tell(name, JobSpec.parse(job_of(events)), events[:-2])
    with Client(address) as client:
        blocking = client.get("quorum")
        assert [each.reason for each in blocking.rounds()] == [
            each.reason for each in rounds(parts["quorum"])
        ]
        num_done = [each.num_done for each in blocking.clients()]
        assert num_done == [each.num_done for each in clients(parts["quorum"])]
        known = population(parts["population"], job_of(parts["population"]))
        lineages = [client.get("population").population().lineage(m) for m in range(4)]
        assert lineages == [known.lineage(m) for m in range(4)]
        names = [each.worker_id for each in client.get("killed").members()]
        assert names == [each.worker_id for each in members(parts["killed"])]
    async with AsyncClient(address) as other:
        run = await other.get("quorum")
        assert len(await run.rounds()) == 3
        assert [each.num_done for each in await run.clients()] == num_done
        assert [each.worker_id for each in await (await other.get("killed")).members()] == names
        found = await (await other.get("population")).population()
        assert [found.lineage(m) for m in range(4)] == lineages
