"""How updates of a round count otherwise than by rows: `options.q`, `options.normalize` and
`options.control`.

Says what goes together with them. Knows the strategy alone; what the clients' optimizer must be
stands with the job.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stratagem.common.base.errors import Violation
from stratagem.common.strategy.choices import FedAvg, FederatedAggregation, FedProx

if TYPE_CHECKING:
    from stratagem.common.strategy.federated_options import FederatedOptions


def check_weighing(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    """Yield what the strategy says besides that does not go together with how updates weigh."""
    if options.q is not None:
        yield from _against_q(options, aggregation)
    if options.normalize is not None:
        yield from _against_normalize(options)
    if options.control is not None:
        yield from _against_control(options, aggregation)


def _against_q(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    if not isinstance(aggregation, FedAvg):
        text = f"is of FedAvg only; the aggregation is {type(aggregation).__name__}"
        yield Violation("options.q", text)
    if options.server_optimizer is not None:
        text = "is not possible with q, which says itself how far a round goes; leave one out"
        yield Violation("options.server_optimizer", text)
    if options.robust is not None:
        text = (
            "is not possible with q, by which a client has the more say the worse it claims to be"
        )
        yield Violation("options.robust", text)
    if options.late_updates != "refuse":
        text = "is not possible with q: the loss of a late client is that of another state"
        yield Violation("options.late_updates", text)
    if options.inner is not None:
        text = "is not possible with q: a silo does not measure its loss before it trains"
        yield Violation("options.inner", text)


def _against_normalize(options: "FederatedOptions") -> Iterator[Violation]:
    if options.q is not None:
        text = "is not possible with q, which takes a change for a gradient as it is; leave one out"
        yield Violation("options.normalize", text)
    if options.robust is not None:
        text = "is not possible with normalize, by which who claims few steps counts more"
        yield Violation("options.robust", text)
    if options.late_updates != "refuse":
        text = "is not possible with normalize: how far clients go is a mean over those of a round"
        yield Violation("options.late_updates", text)
    if options.inner is not None:
        text = "is not possible with normalize: how far a silo goes its own strategy decides"
        yield Violation("options.inner", text)


def _against_control(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    together = "is not possible with control: scaffold"
    if isinstance(aggregation, FedProx) and aggregation.mu:
        text = f"{together}, which takes the term of FedProx for a gradient of the rows; use FedAvg"
        yield Violation("aggregation.mu", text)
    for name, why in {
        "q": "in which each client counts as one",
        "normalize": "in which each change counts as it is",
        "robust": "whose common state is a sum over clients, which one false one leads anywhere",
        "personal": "which is not defined for tensors that are not shared",
        "ditto": "which is not defined beside a second model",
    }.items():
        if getattr(options, name) is not None:
            yield Violation(f"options.{name}", f"{together}, {why}; leave one out")
    if options.late_updates != "refuse":
        text = f"{together}: a late update was corrected by the common state of another round"
        yield Violation("options.late_updates", text)
    if options.open_roster is not None:
        text = f"{together}, which divides by the number of all clients; give a fixed roster"
        yield Violation("options.roster.open", text)
