"""The ledger of a run whose rows are protected: what each client has spent of its budget.

A client's worker, which knows its rows, computes what its rounds cost and refuses a round beyond
the target. Here it is counted how often each was asked, which has been paid for whatever became of
it, and who can take part in the next round. Pure functions of the ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import RowsAsked
from stratagem.coordinator.core.facts import (
    ClientBinding,
    ClientsSelected,
    Excused,
    Fact,
    RowsSpent,
    StoppedEarly,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.strategies.federated.ledgers import EPSILON

_SPENT: Final = "privacy budget spent"


@dataclass(frozen=True, slots=True)
class RowLedger:
    """What the clients of a run have spent."""

    num_asked: Mapping[int, int] = field(default_factory=dict)
    """By client: the rounds that were opened with it, also those that the run went back behind."""
    spent: Mapping[int, RowsSpent] = field(default_factory=dict)
    """By client, with its newest update."""
    refused: frozenset[int] = frozenset()
    """The clients that have refused a round beyond their budget."""

    def fold(self, fact: Fact) -> "RowLedger":
        """Fold the opening of a round, or an answer of one of its clients."""
        match fact:
            case ClientsSelected():
                more = {client: self.num_asked.get(client, 0) + 1 for client in fact.clients}
                return replace(self, num_asked={**self.num_asked, **more})
            case UpdateReceived(client=client, spent=RowsSpent() as spent):
                return replace(self, spent={**self.spent, client: spent})
            case UpdateRejected(client=client, cause=Cause.BUDGET):
                return replace(self, refused=self.refused | {client})
            case _:
                return self


def begun(job: JobSpec) -> RowLedger | None:
    """Return the ledger of a run that has spent nothing; None where no rows are protected."""
    return RowLedger() if job.privacy is not None and job.privacy.unit == "row" else None


def asked(ledger: RowLedger, client: int) -> RowsAsked:
    """Return what the worker of a client in the open round is told."""
    known, num_rounds = ledger.spent.get(client), ledger.num_asked.get(client, 1) - 1
    return RowsAsked(num_rounds, "" if known is None else known.fingerprint)


def with_budget(
    job: JobSpec, ledger: RowLedger, clients: Sequence[ClientBinding]
) -> tuple[list[ClientBinding], tuple[Excused, ...]]:
    """Return the clients that can take part in one more round, as far as is known before, and the
    others as excused."""
    able = [binding for binding in clients if _has_budget(job, ledger, binding.client)]
    others = tuple(b.client for b in clients if not _has_budget(job, ledger, b.client))
    return able, (Excused(reason=_SPENT, clients=others),) if others else ()


def _has_budget(job: JobSpec, ledger: RowLedger, client: int) -> bool:
    assert job.privacy is not None
    target, known = job.privacy.target.epsilon, ledger.spent.get(client)
    if client in ledger.refused:
        return False
    return target is None or known is None or known.next_epsilon <= target


def budget_spent(job: JobSpec, ledger: RowLedger, segment: int) -> StoppedEarly:
    """Return the end of a run none of whose clients can take part in one more round; segment: the
    newest committed one."""
    assert job.privacy is not None
    target = job.privacy.target.epsilon or 0.0
    text = f"up to {most_spent(ledger):.3g} of {target:g} spent by a client"
    reason = f"stopped early after {counted(segment, 'round')}: privacy budget: {text}, and one "
    return StoppedEarly(reason=f"{reason}more round would cost each of them more", step=segment)


def most_spent(ledger: RowLedger) -> float:
    """Return the epsilon of the client that has spent most."""
    return max((known.epsilon for known in ledger.spent.values()), default=0.0)


def row_metrics(ledger: RowLedger) -> dict[str, float]:
    """Return the metrics of a round: nothing of its rows."""
    return {EPSILON: most_spent(ledger)}
