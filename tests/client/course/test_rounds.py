"""The rounds and clients that a client reads from the events of a federation."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.client.course.client_sums import ClientState
from stratagem.client.course.rounds import RoundsFolding, clients, rounds
from stratagem.client.course.views import Event, Phase
from tests.client.course.recorded import golden

Fact = tuple[str, Mapping[str, Any]]

MEMBER = {"worker_id": "worker-0", "incarnation": "a"}


def events(*facts: Fact) -> list[Event]:
    return [
        Event(index, 10.0 + index, kind, kind, {"party": "", **payload}, Phase.RUNNING)
        for index, (kind, payload) in enumerate(facts)
    ]


def selected(round_num: int, *chosen: int) -> Fact:
    fact = {"round_num": round_num, "clients": chosen, "deadline_s": 9.5, "num_needed": 2}
    return "ClientsSelected", fact


def received(round_num: int, client: int, samples: int, loss: object) -> Fact:
    fact = {"num_samples": samples, "loss": loss, "seconds": 0.5, "traffic": {"sent_bytes": 7}}
    return "UpdateReceived", {"round_num": round_num, "client": client, **fact}


def rejected(round_num: int, client: int, cause: str) -> Fact:
    fact = {"client": client, "cause": cause, "reason": "its loss is NaN"}
    return "UpdateRejected", {"round_num": round_num, **fact}


def closed(round_num: int, **accepted: tuple[int, int]) -> Fact:
    listed = [
        {"client": int(name[1:]), "num_samples": samples, "staleness": staleness}
        for name, (samples, staleness) in accepted.items()
    ]
    return "RoundClosed", {"round_num": round_num, "accepted": listed, "reason": "", "metrics": {}}


ASSIGNED: Fact = (
    "ClientsAssigned",
    {
        "round_num": 1,
        "assignments": [{"client": 0, "member": MEMBER}, {"client": 1, "member": None}],
    },
)
FACTS: list[Fact] = [
    ("RosterFormed", {"clients": [{"client": 4, "worker_id": "worker-3", "tags": ["site-a"]}]}),
    selected(1, 2, 0, 1),
    ASSIGNED,
    received(1, 0, 30, 2.0),
    rejected(1, 2, "not_finite_loss"),
    received(1, 1, 10, 4.0),
    closed(1, c0=(30, 0), c1=(10, 0)),
    selected(2, 0, 1, 3),
    received(2, 3, 5, "NaN"),
    rejected(2, 3, "not_finite"),
    received(2, 0, 30, 1.0),
    closed(2, c0=(30, 0)),
    received(2, 1, 20, 3.0),
    selected(3, 0),
    received(3, 0, 20, 1.0),
    closed(3, c0=(20, 0), c1=(20, 1)),
]


def test_a_round_says_what_has_become_of_each_client_and_its_weighted_loss() -> None:
    first, second, third = rounds(events(*FACTS))
    assert [each.state for each in first.clients] == ["done", "done", "rejected"]
    assert first.loss == (30 * 2.0 + 10 * 4.0) / 40
    assert [each.client for each in first.with_state(ClientState.REJECTED)] == [2]
    assert first.clients[2].cause == "not_finite_loss"
    assert first.clients[0].worker_id == "worker-0"
    assert (first.began_s, first.seconds, first.num_needed) == (11.0, 5.0, 2)
    assert [each.state for each in second.clients] == ["done", "late", "rejected"]
    assert second.loss == 1.0
    # The late update counts one round later.
    assert [(each.client, each.staleness, each.loss) for each in third.clients] == [
        (0, 0, 1.0),
        (1, 1, 3.0),
    ]
    assert third.loss == (20 * 1.0 + 20 * 3.0) / 40


def test_what_comes_after_the_close_is_late_and_keeps_its_cause() -> None:
    facts = [selected(1, 0, 1), received(1, 0, 30, 2.0), closed(1, c0=(30, 0))]
    (one,) = rounds(events(*facts, rejected(1, 1, "not_finite")))
    assert [(each.state, each.cause) for each in one.clients] == [
        ("done", ""),
        ("late", "not_finite"),
    ]


def test_of_few_rounds_the_newest_are_kept() -> None:
    found = RoundsFolding(most=2)
    assert (found.newest, found.number) == (None, 0)
    for event in events(*FACTS):
        found.fold(event)
    assert [each.number for each in found.rounds] == [2, 3]
    assert found.newest == rounds(events(*FACTS))[-1]


def test_clients_are_counted_over_all_rounds() -> None:
    zero, one, two, three, four = clients(events(*FACTS))
    assert (zero.num_selected, zero.num_done, zero.sent_bytes, zero.seconds) == (3, 3, 21, 0.5)
    assert (one.num_selected, one.num_done, one.num_late) == (2, 1, 1)
    assert two.causes == {"not_finite_loss": 1}
    assert (three.state, three.reason) == (ClientState.REJECTED, "its loss is NaN")
    assert (four.worker_id, four.tags, four.state) == ("worker-3", ("site-a",), None)
    assert math.isnan(four.loss)


def test_what_a_resumption_undoes_is_left_out() -> None:
    resumed: Fact = ("RunResumed", {"from_segment": 1})
    again = [selected(2, 1), received(2, 1, 10, 8.0), closed(2, c1=(10, 0))]
    found = rounds(events(*FACTS, resumed, *again))
    assert [(each.number, each.loss) for each in found] == [(1, 2.5), (2, 8.0)]


@pytest.mark.parametrize("run", ["golden-fedavg", "golden-quorum", "golden-silos"])
def test_the_loss_of_a_real_round_is_what_the_coordinator_has_computed(run: str) -> None:
    found = rounds(golden(run))
    assert len(found) == 3
    for each in found:
        assert each.loss == pytest.approx(each.metrics["train.loss"], rel=1e-12)
        assert each.seconds is not None
        assert "test.accuracy" in each.metrics
        assert len(each.with_state(ClientState.DONE)) >= 2


def test_other_runs_have_no_rounds() -> None:
    assert rounds(golden("golden-local")) == ()
    assert clients(golden("golden-local")) == ()


def test_who_was_not_asked_or_has_left_is_excused_and_a_round_goes_on_with_others() -> None:
    joined = [{"client": n, "worker_id": f"w{n}", "tags": []} for n in range(4)]
    away = [{"reason": "away", "clients": [3]}]
    facts: list[Fact] = [
        ("ClientsJoined", {"clients": joined}),
        ("ClientsSelected", {**selected(1, 0, 1, 2)[1], "excused": away}),
        received(1, 0, 30, 2.0),
        ("ClientLeft", {"client": 0, "reason": "its worker was stopped"}),
        ("ClientLeft", {"client": 1, "reason": "its worker was stopped"}),
        rejected(1, 2, "outside_window"),
    ]
    (first,) = rounds(events(*facts))
    assert [each.state for each in first.clients] == ["done", "excused", "excused", "excused"]
    assert [each.reason for each in first.clients][1:] == [
        "its worker was stopped", "its loss is NaN", "away",
    ]  # fmt: skip
    facts += [selected(1, 0, 4), received(1, 4, 10, 4.0), closed(1, c0=(30, 0), c4=(10, 0))]
    (first,) = rounds(events(*facts))
    assert [each.state for each in first.clients] == ["done", *["excused"] * 3, "done"]
    assert first.loss == (30 * 2.0 + 10 * 4.0) / 40
    assert first.began_s == 11.0
    found = clients(events(*facts))
    assert [(each.worker_id, each.num_selected) for each in found] == [
        ("w0", 1), ("w1", 0), ("w2", 0), ("w3", 0), ("", 1),
    ]  # fmt: skip


def test_a_client_sits_on_the_bench_until_its_round_has_begun_or_the_run_goes_back() -> None:
    benched: Fact = ("ClientBenched", {"client": 2, "until_round": 4, "reason": "rejected"})
    facts = [*FACTS[:7], benched, selected(2, 0, 1), selected(3, 0, 1)]

    def sitting(*more: Fact) -> list[int | None]:
        return [each.benched_until for each in clients(events(*facts, *more))]

    assert sitting() == [None, None, 4, None]
    assert sitting(selected(4, 0, 2)) == [None] * 4
    assert sitting(("RunResumed", {"from_segment": 1})) == [None] * 4
    assert sitting(("RunResumed", {"from_segment": None})) == [None, None, 4, None]
