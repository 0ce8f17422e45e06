"""Blobs that are kept for a job, where that takes longer than a call may."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import InProgressError, WrongStateError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.app import keeping
from stratagem.coordinator.app.keeping import KeptBlobs
from stratagem.coordinator.store.blobs import BlobStore
from tests.coordinator.core.jobs import LOCAL
from tests.coordinator.service.serving import served
from tests.jobs import document

DIGEST = Digest("a" * 64)


@dataclass
class SlowStore:
    """A store that copies until it is let go, and then says how that ended."""

    ends: Callable[[], bool]
    may_end: threading.Event = field(default_factory=threading.Event)
    num_copied: int = 0

    def keep(self, _digest: Digest) -> bool:
        self.num_copied += 1
        assert self.may_end.wait(60)
        return self.ends()


class ToldBlobs(KeptBlobs):
    """Blobs that are not kept yet when they are asked for, and the news of such an answer."""

    def __init__(self, store: SlowStore) -> None:
        super().__init__(cast("BlobStore", store), answer_after_s=0.0)
        self.told = asyncio.Event()

    async def keep(self, digest: Digest) -> bool:
        try:
            return await super().keep(digest)
        except InProgressError:
            self.told.set()
            raise

    def let_go(self, store: SlowStore) -> None:
        """Let the copying end, and calls wait for that."""
        self.answer_after_s = 60.0
        store.may_end.set()


def refuse() -> bool:
    raise WrongStateError("the store refuses to copy")


async def test_a_call_is_answered_before_the_copying_ends_and_the_next_ones_join_it() -> None:
    store = SlowStore(lambda: True)
    kept = ToldBlobs(store)
    for _ in range(3):
        with pytest.raises(InProgressError, match=r"a{64} is being made to stay"):
            await kept.keep(DIGEST)
    kept.let_go(store)
    assert await kept.keep(DIGEST)
    assert store.num_copied == 1
    assert await kept.keep(DIGEST)
    assert store.num_copied == 2, "each call that names it has it kept for itself"


async def test_what_was_kept_long_ago_is_kept_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_long_as_ever_the_second_time() -> bool:
        if store.num_copied == 2:
            monkeypatch.undo()
        return True

    store = SlowStore(as_long_as_ever_the_second_time)
    monkeypatch.setattr(keeping, "STAYS_S", 0.0)
    kept = ToldBlobs(store)
    with pytest.raises(InProgressError):
        await kept.keep(DIGEST)
    kept.let_go(store)
    assert await kept.keep(DIGEST)
    assert store.num_copied == 2


async def test_of_calls_that_wait_together_each_has_it_kept_for_itself() -> None:
    """And one that is gone does not end the copying."""
    store = SlowStore(lambda: True)
    kept = KeptBlobs(cast("BlobStore", store), answer_after_s=60.0)
    gone, *waiting = [asyncio.create_task(kept.keep(DIGEST)) for _ in range(4)]
    await asyncio.sleep(0)  # all have begun
    gone.cancel()
    store.may_end.set()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert store.num_copied in (3, 4)


async def test_how_the_copying_failed_is_told_to_the_next_call_and_then_tried_again() -> None:
    store = SlowStore(refuse)
    kept = ToldBlobs(store)
    with pytest.raises(InProgressError):
        await kept.keep(DIGEST)
    kept.let_go(store)
    with pytest.raises(WrongStateError, match="refuses to copy"):
        await kept.keep(DIGEST)
    assert store.num_copied == 1
    store.ends = lambda: True
    assert await kept.keep(DIGEST)


async def test_a_job_is_submitted_once_while_what_it_names_is_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (app, address), AsyncClient(address, patience_s=0.0) as client:
        store = SlowStore(lambda: True)
        kept = ToldBlobs(store)
        monkeypatch.setattr(app, "kept", kept)
        monkeypatch.setattr("stratagem.coordinator.service.streams.may_name", _anything)
        job = document(strategy=LOCAL, initial={"digest": DIGEST})
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(client.submit(job, "mine"))
            await kept.told.wait()
            kept.let_go(store)
        assert submitting.result().run_id == "mine"
        # A client that has lost the answer asks again: the run has what it names.
        num_copied = store.num_copied
        assert (await client.submit(job, "mine")).run_id == "mine"
        assert store.num_copied == num_copied


def _anything(*_: object) -> bool:
    return True
