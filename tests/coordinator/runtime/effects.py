"""Effects for tests that need one and no run."""

from stratagem.common.base.ids import Digest, Incarnation, Party, RunId, WorkerId
from stratagem.coordinator.core.effects import Base, ExchangeMethod, RunSegment
from stratagem.coordinator.core.facts import Member

ROOT = Party("")


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(name))


def segment(run: str, *names: str, number: int = 1, membership: int = 1) -> RunSegment:
    members = tuple(member(name) for name in names)
    return RunSegment(
        run_id=RunId(run),
        party=ROOT,
        membership=membership,
        segment=number,
        to_step=10,
        base=Base(0, 0, Digest("d")),
        lineage=0,
        members=members,
        num_shards=2,
        exchange=ExchangeMethod.ALL_REDUCE,
        parts=(members,),
        ranks=(),
        evaluate=(),
    )
