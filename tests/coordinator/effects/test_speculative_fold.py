"""Folds that begin before their round is closed: which ones, for whom, and when they stop."""

import asyncio
import threading
from pathlib import Path

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.coordinator.core.effects import AggregateRound, Base, Effect
from stratagem.coordinator.core.facts import ROOT, Accepted, UpdateReceived
from stratagem.coordinator.effects.execution.speculative_fold import Folded, FoldsAhead
from stratagem.coordinator.updates.spool_upload import SpoolEntry, update_digest

RUN = RunId("run")
CLIENTS = (0, 1, 2)
BASE = Base(segment=0, step=0, digest=Digest("0" * 64))


def received(client: int, crc32c: int = 1) -> UpdateReceived:
    return UpdateReceived(
        party=ROOT,
        round_num=1,
        client=client,
        digest=update_digest(crc32c),
        num_samples=5,
        loss=0.0,
        seconds=0.0,
    )


def entry(client: int, crc32c: int = 1) -> SpoolEntry:
    return SpoolEntry(Path(f"{client}"), update_digest(crc32c), 5, 0, 0, crc32c)


def effect_of(facts: list[UpdateReceived]) -> AggregateRound:
    accepted = tuple(
        Accepted(client=fact.client, digest=fact.digest, num_samples=fact.num_samples)
        for fact in sorted(facts, key=lambda fact: fact.client)
    )
    return AggregateRound(RUN, ROOT, 1, BASE, accepted)


class Folding:
    """A core that closes the round when all clients are known, and folds that can be held up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[AggregateRound, list[SpoolEntry]]] = []
        self.folds = FoldsAhead(self._foresee)

    def _foresee(self, _run_id: RunId, facts: list[UpdateReceived]) -> frozenset[Effect]:
        done = {fact.client for fact in facts} == set(CLIENTS)
        return frozenset({effect_of(facts)} if done else ())

    def fold(
        self, effect: AggregateRound, entries: list[SpoolEntry], cancelled: threading.Event
    ) -> Folded:
        self.asked.append((effect, entries))
        self.gate.wait()
        name = "stopped" if cancelled.is_set() else ",".join(str(each.path) for each in entries)
        return Digest(name), (), (Manifest((), 0, Purpose.STATE), 0)

    def see(self, client: int, crc32c: int = 1) -> None:
        self.folds.see(RUN, received(client, crc32c), entry(client, crc32c), self.fold)


async def test_the_last_update_begins_the_fold_of_all_in_client_order() -> None:
    folding = Folding()
    for client in (2, 0, 1):
        assert not folding.asked
        folding.see(client)
    effect = effect_of([received(client) for client in CLIENTS])
    begun = folding.folds.take(effect)
    assert begun is not None
    assert (await begun.task)[0] == "0,1,2"
    assert folding.folds.take(effect) is None
    assert [each for each, _ in folding.asked] == [effect]


async def test_another_fold_than_the_one_that_is_due_is_stopped() -> None:
    folding = Folding()
    folding.gate.clear()
    for client in CLIENTS:
        folding.see(client)
    begun = folding.folds._begun[RUN, ROOT]
    assert folding.folds.take(effect_of([received(0)])) is None
    folding.gate.set()
    assert (await begun.task)[0] == "stopped"


async def test_an_update_that_is_sent_again_begins_the_fold_anew() -> None:
    folding = Folding()
    folding.gate.clear()
    for client in CLIENTS:
        folding.see(client)
    before = folding.folds._begun[RUN, ROOT]
    folding.see(1)  # the same one: nothing new
    assert folding.folds._begun[RUN, ROOT] is before
    folding.see(1, crc32c=2)
    after = folding.folds._begun[RUN, ROOT]
    folding.gate.set()
    assert ((await before.task)[0], (await after.task)[0]) == ("stopped", "0,1,2")


async def test_a_run_that_ends_stops_its_fold() -> None:
    folding = Folding()
    folding.gate.clear()
    for client in CLIENTS:
        folding.see(client)
    begun = folding.folds._begun[RUN, ROOT]
    folding.folds.forget(RUN)
    folding.gate.set()
    assert (await begun.task)[0] == "stopped"
    assert not folding.folds._rounds


async def test_what_was_reported_is_not_foreseen_again() -> None:
    folding = Folding()
    for client in CLIENTS[:2]:
        folding.see(client)
        with folding.folds.reporting(RUN, received(client)):
            await asyncio.sleep(0)
    folding.see(2)  # our core forgets what it was told: only this one is new
    assert not folding.asked
