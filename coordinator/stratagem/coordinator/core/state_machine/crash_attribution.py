"""Attribution of a process's end to the work it died at, by what the worker's next process
reports."""

from stratagem.common.base.ids import is_within
from stratagem.coordinator.core.commands import Ending, JournalEntry
from stratagem.coordinator.core.crash_loops import was_asked_to_end
from stratagem.coordinator.core.facts import Fact, Member, ProcessDied
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.state_machine.strategy_boundary import deaths_of


def deaths_at_work(
    state: CoordinatorState, member: Member, ending: Ending | None
) -> tuple[JournalEntry, ...]:
    """Return the deaths to journal for a member whose process has ended without draining.

    Empty when the process was stopped from outside. Where it is known which plan it executed, only
    the deaths of that work.
    """
    if ending is None or ending.incarnation != member.incarnation:
        ending = Ending(member.incarnation)
    if ending.is_stopped or was_asked_to_end(ending.status):
        return ()
    entries: list[JournalEntry] = []
    for run_id, run in state.runs.items():
        if run.ended is None and member in run.touched and ending.run_id in (None, run_id):
            entries += [
                JournalEntry(run_id, _told(fact, ending)) for fact in deaths_of(run, member)
            ]
    return tuple(entry for entry in entries if _concerns(entry.fact, ending))


def _told(fact: Fact, ending: Ending) -> Fact:
    """Return the fact with what the worker's next process has reported added."""
    if not isinstance(fact, ProcessDied):
        return fact
    at = None if ending.run_id is None else ending.party
    known = {"at": at, "step": ending.step, "status": ending.status, "lines": ending.lines}
    return fact.model_copy(update=known)


def _concerns(fact: Fact, ending: Ending) -> bool:
    """Return True for a death of the party whose plan the process executed, or of one around it."""
    if not isinstance(fact, ProcessDied) or ending.run_id is None:
        return True
    return is_within(ending.party, fact.party)
