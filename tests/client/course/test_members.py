"""When workers were members, and why they were no longer."""

from dataclasses import replace

from stratagem.client.course.members import members
from stratagem.client.course.views import Event, Phase
from tests.client.course.recorded import golden


def formed(at: int, reason: str, *names: str) -> Event:
    listed = [{"worker_id": name[:-1], "incarnation": name[-1]} for name in names]
    fact = {"party": "", "membership": at, "members": listed, "reason": reason}
    return Event(at, 10.0 + at, "MembersFormed", "members", fact, Phase.RUNNING)


def test_an_interval_ends_with_its_process_and_says_why() -> None:
    died = {"party": "", "member": {"worker_id": "w1", "incarnation": "a"}, "status": -9, "step": 7}
    found = members(
        [
            formed(0, "w0, w1, w2 joined, 3 of 3 workers", "w0a", "w1a", "w2a"),
            Event(1, 11.0, "ProcessDied", "died", died, Phase.RECOVERING),
            formed(2, "w1, w2 lost, w1 joined, 2 of 3 workers", "w0a", "w1b"),
            formed(3, "w1 released, 1 of 3 workers", "w0a"),
            Event(4, 14.0, "RunCancelled", "stopped by alice", {"reason": ""}, Phase.CANCELLED),
        ]
    )
    assert [(i.worker_id, i.began_s, i.ended_s, i.is_lost) for i in found] == [
        ("w0", 10.0, 14.0, False),
        ("w1", 10.0, 12.0, True),
        ("w2", 10.0, 12.0, True),
        ("w1", 12.0, 13.0, False),
    ]
    whole, killed, lost, released = found
    assert whole.ending == "stopped by alice"
    assert (killed.ending, killed.step) == ("its process ended: SIGKILL", 7)
    assert lost.ending == "w1, w2 lost, w1 joined, 2 of 3 workers"
    assert released.ending == "w1 released, 1 of 3 workers"


def test_a_worker_that_was_killed_in_a_real_run_says_that_it_is_lost() -> None:
    found = members(golden("golden-killed", "0.1.0"))
    lost = [each for each in found if each.is_lost]
    assert len(lost) == 1
    assert lost[0].ended_s is not None
    assert all(each.ended_s is not None for each in found)


def test_members_of_a_run_that_goes_on_have_no_end() -> None:
    found = members(golden("golden-allreduce")[:5])
    assert [(each.ended_s, each.ending) for each in found] == [(None, "")] * len(found)
    assert len(found) > 1


def test_who_only_verifies_is_no_member() -> None:
    verifier = formed(1, "verifies segment 1", "w1a")
    verifier = replace(verifier, payload={**verifier.payload, "party": "verifier"})
    found = members([formed(0, "w0 joined, 1 of 1 workers", "w0a"), verifier])
    assert [each.worker_id for each in found] == ["w0"]
