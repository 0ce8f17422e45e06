"""The new state of a round goes ahead to the workers that the next one is expected on, alone."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from stratagem.common.base.ids import Digest, Incarnation, Party, WorkerId
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import ROOT, ClientBinding, Member
from stratagem.coordinator.effects.aggregate import _bring_ahead
from stratagem.coordinator.effects.context import LiveRuns, Transfers
from stratagem.coordinator.strategies.federated.run import Federation
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, start

NEW = Digest("n" * 64)
MEMBERS = [Member(worker_id=WorkerId(n), incarnation=Incarnation("one")) for n in "abc"]
ROSTER = tuple(
    ClientBinding(client=number, worker_id=member.worker_id, tags=(member.worker_id,))
    for number, member in enumerate(MEMBERS)
)


def in_round(number: int) -> Federation:
    committed = Base(number - 1, number - 1, Digest("o" * 64))
    return Federation(party=ROOT, roster=ROSTER, committed=committed)


def brought(value: Any, round_num: int = 1, members: Sequence[Any] = ()) -> list[str]:
    """The workers that get the state, of a job that selects those with the tag b; members: of a
    run that is a population, of which the first has made it."""
    only_b = {"method": "ByCapability", "required_tags": ["b"]}
    strategy = {**FEDERATED, "num_clients": 3, "client_selection": only_b}
    job = start(job_text(strategy), "a").state.runs[RUN].job
    leaf = SimpleNamespace(children=lambda _value: ())
    inside = [
        SimpleNamespace(party=Party(f"member{n}"), strategy=leaf, value=each)
        for n, each in enumerate(members)
    ]
    strategy_of_run = SimpleNamespace(children=lambda _value: inside)
    run = SimpleNamespace(
        ended=None, touched=frozenset(MEMBERS), value=value, strategy=strategy_of_run
    )
    usable = {m.worker_id: SimpleNamespace(member=m, is_usable=True) for m in MEMBERS}
    names: list[str] = []
    runs = SimpleNamespace(
        state=SimpleNamespace(runs={RUN: run}, workers=usable), job_of=lambda _run_id, _party: job
    )
    transfers = SimpleNamespace(
        start_push=lambda member, _run_id, _digest: names.append(member.worker_id)
    )
    party = Party("member0") if members else ROOT
    effect: Any = SimpleNamespace(run_id=RUN, party=party, round_num=round_num)
    _bring_ahead(cast(LiveRuns, runs), cast(Transfers, transfers), effect, NEW)
    return sorted(names)


def test_only_workers_of_the_next_round_get_the_state() -> None:
    """A model of 100 MB to a site that is not asked would take its link for seconds. That of a
    member of a population goes to the workers of its own next round, and where silos choose all
    get it."""
    assert brought(in_round(1)) == ["b"]
    one = replace(in_round(1), party=Party("member0"))
    other = replace(in_round(1), party=Party("member1"), roster=())
    assert brought(object(), members=(one, other)) == ["b"]
    assert brought(object()) == ["a", "b", "c"]
    assert brought(in_round(3), round_num=3) == []
