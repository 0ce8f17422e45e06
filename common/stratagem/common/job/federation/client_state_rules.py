"""What goes together with state that the clients of a federation keep from round to round."""

from collections.abc import Iterator
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.strategy import Federated, PopulationBased, Strategy

_WHERE: Final = "strategy.options"


def check_client_state(
    strategy: Strategy, *, is_at_workers: bool, is_private: bool, is_evaluated: bool
) -> Iterator[Violation]:
    """Yield what does not go together with the state of clients in a job.

    is_at_workers: its rows never leave a worker, and each client has one of its own.
    """
    if isinstance(strategy, PopulationBased):
        inner = strategy.options.inner
        if isinstance(inner, Federated) and inner.options.has_client_state:
            text = (
                "a member that copies another one cannot copy what its clients keep; leave it out"
            )
            yield Violation(f"{_WHERE}.inner.options.{_key(inner)}", text)
        return
    if not isinstance(strategy, Federated) or not strategy.options.has_client_state:
        return
    where = f"{_WHERE}.{_key(strategy)}"
    if strategy.options.personal is not None and is_evaluated and not is_at_workers:
        text = "is not possible with strategy.options.personal and simulated clients: one worker "
        text += "evaluates for all, and no model is whole there; leave it out, or use "
        yield Violation("evaluation", f"{text}data.worker_local")
    if strategy.options.q is not None and strategy.options.has_own_models:
        text = "is not possible with q, which weighs clients by the loss of one model for all"
        yield Violation(where, f"{text}; leave one out")
    if is_private:
        text = "is not possible with privacy: no accountant here counts what a client keeps"
        yield Violation(where, text)


def _key(strategy: Federated) -> str:
    names = ("personal", "ditto", "control")
    return next(name for name in names if getattr(strategy.options, name) is not None)
