"""Facts of runs in short, and the claims that a client reads from them."""

from collections.abc import Mapping
from typing import Any

from stratagem.client.course.claims import RunClaims
from stratagem.client.course.views import Event, Phase

Fact = tuple[str, Mapping[str, Any]]


def claims_of(*facts: Fact) -> RunClaims:
    return RunClaims.of(events_of(facts))


def events_of(facts: tuple[Fact, ...]) -> list[Event]:
    return [
        Event(index, 0.0, kind, kind, {"party": "", **payload}, Phase.RUNNING)
        for index, (kind, payload) in enumerate(facts)
    ]


def formed(*workers: str, party: str = "", fingerprint: str = "n") -> Fact:
    members = [{"worker_id": each, "incarnation": "a"} for each in workers]
    return "MembersFormed", {"party": party, "members": members, "fingerprint": fingerprint}


def committed(segment: int, step: int, digest: str, party: str = "", **more: Any) -> Fact:
    of = {"party": party, "segment": segment, "step": step, "digest": digest}
    return "SegmentCommitted", {**of, **more}


def assigned(round_num: int, **workers: str | None) -> Fact:
    each = [
        {"client": int(name[1:]), "member": worker and {"worker_id": worker}}
        for name, worker in workers.items()
    ]
    return "ClientsAssigned", {"round_num": round_num, "assignments": each}


def received(round_num: int, client: int, digest: str, num_samples: int = 5) -> Fact:
    of = {"round_num": round_num, "client": client, "digest": digest}
    return "UpdateReceived", {**of, "num_samples": num_samples}


def closed(round_num: int, *bases: str, by_policy: bool = False) -> Fact:
    accepted = [{"client": client, "base": base} for client, base in enumerate(bases)]
    return "RoundClosed", {"round_num": round_num, "accepted": accepted, "by_policy": by_policy}


BUILT: Fact = ("ModelBuilt", {"segment": 0, "step": 0, "digest": "m"})
