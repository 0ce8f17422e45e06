"""The identifiers that a log line or a span carries about an effect or a fact."""

from typing import Any

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.state_machine.apply import CLUSTER

_NAMES = (("party", "party"), ("segment", "segment"), ("round", "round_num"))


def ids_of(run_id: RunId, thing: object) -> dict[str, Any]:
    """Return run_id, party, segment or round, worker_id, member of a population: those that
    it has."""
    ids: dict[str, Any] = {} if run_id == CLUSTER else {"run_id": run_id}
    for key, name in _NAMES:
        value = getattr(thing, name, None)
        if value is not None:
            ids[key] = value
    member = getattr(thing, "member", None)
    if isinstance(member, Member):
        ids["worker_id"] = member.worker_id
    elif member is not None:
        ids["member"] = member
    return ids
