"""Copies of snapshots that are offered: what of them counts as sent, and when they are closed."""

import pytest
import torch

from stratagem.common.rpc.tensor_transfer import serve_get
from stratagem.common.tensors.local_files import copy_of, opened_copy, readable_copy
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.stream import sent
from stratagem.v1 import types_pb2, worker_pb2
from stratagem.worker.service.service import WorkerServicer
from stratagem.worker.service.sessions import Session, Sessions, key_from
from stratagem.worker.session.context import RunCache
from stratagem.worker.session.states import Frozen, StateStore, freeze

REF = types_pb2.SessionRef(run_id="r-1", party="clients/3")


def update(*, offered: bool = True) -> Frozen:
    made = freeze({"weight": torch.arange(7.0)}, {}, Purpose.UPDATE)
    copy = copy_of(made.buffers) if offered else None
    return Frozen(made.manifest, made.buffers, copy=copy)


def session_of(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, WorkerServicer]:
    """A session, and what serves it."""
    session = Session(key_from(REF), RunCache())
    servicer, sessions = object.__new__(WorkerServicer), Sessions(None)  # type: ignore[arg-type]
    servicer.sessions = sessions
    monkeypatch.setitem(sessions._sessions, session.key, session)
    return session, servicer


def test_an_update_that_was_offered_is_counted_once_and_forgotten_with_its_snapshot() -> None:
    for is_last in (True, False):
        store, state, sent = StateStore(), update(), update(offered=False)
        store.keep(1, state, 1)
        if not is_last:
            store.keep(2, sent, 1)
        assert store.end_offer(state) == is_last
        assert not store.end_offer(state)
    assert not store.end_offer(sent)
    store.note_offered(sent)
    assert store.end_offer(sent)


@pytest.mark.parametrize(
    ("offered", "place", "counted"),
    [(True, "", True), (True, "here", True), (False, "", False), (False, "here", False)],
)
async def test_a_stream_in_place_of_an_offer_that_could_not_be_read_counts_no_byte_again(
    offered: bool, place: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, (session, servicer) = update(offered=offered), session_of(monkeypatch)
    session.states.keep(1, state, 1)
    ask = worker_pb2.GetStateRequest(session=REF, snapshot=1, place=place)
    flow = sent(Purpose.UPDATE)
    for is_counted in (counted, False):
        before = flow.num_bytes
        assert servicer._note_offer(ask, state, has_copy=False) is is_counted
        stream = serve_get(
            worker_pb2.GetStateResponse, state.manifest, state.buffers, is_counted=is_counted
        )
        async for _ in stream:
            pass
        assert (flow.num_bytes == before) is is_counted


def test_a_copy_of_a_snapshot_counts_again_only_for_who_reads_files_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, (_, servicer) = update(offered=False), session_of(monkeypatch)
    ask = worker_pb2.GetStateRequest(session=REF, snapshot=1, place="here")
    for _ in range(2):  # a coordinator that was started anew has read both
        assert not servicer._note_offer(ask, state, has_copy=True)
    ask.place = ""
    assert servicer._note_offer(ask, state, has_copy=False)
    assert not servicer._note_offer(ask, state, has_copy=False)


def test_to_abort_a_session_closes_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    state, (session, servicer) = update(), session_of(monkeypatch)
    assert state.copy is not None
    offer = state.copy.offer()
    session.states.keep(1, state, 1)
    found = opened_copy(offer)
    assert found is not None
    found.close()
    servicer.sessions.abort(REF)
    assert readable_copy(offer, state.manifest.total_bytes) is None
    with session.states.reading(1) as read:
        assert read.buffers == state.buffers
    servicer.sessions.abort(types_pb2.SessionRef(run_id="r-2"))
