"""What a job with `strategy.options.secure_aggregation` may not say besides."""

from collections.abc import Iterator

from stratagem.common.base.errors import Violation
from stratagem.common.strategy import Federated, PopulationBased, Strategy


def check_secure_aggregation(
    strategy: Strategy,
    *,
    is_coded: bool,
    is_private: bool,
    evaluates_at_clients: bool,
    records_clients: bool,
) -> Iterator[Violation]:
    """Yield what would show a single client's update, or cannot be added up under masks.

    is_coded: the job has a codec. is_private: it has the section `privacy`. evaluates_at_clients:
    each client evaluates on rows of its own. records_clients: single steps of clients are kept.
    """
    if isinstance(strategy, PopulationBased):
        inner = strategy.options.inner
        if isinstance(inner, Federated) and inner.options.secure_aggregation is not None:
            text = (
                "is not possible in a population: a member repeats rounds from other states, and a "
                "round is unmasked once"
            )
            yield Violation("strategy.options.inner.options.secure_aggregation", text)
    if not isinstance(strategy, Federated) or strategy.options.secure_aggregation is None:
        return
    if is_coded:
        text = "is not possible with secure_aggregation, which sends whole numbers under masks"
        yield Violation("compression", text)
    if is_private:
        text = (
            "is not possible with secure_aggregation: noise is added where the updates are seen, "
            "and they are seen nowhere"
        )
        yield Violation("privacy", text)
    if evaluates_at_clients:
        text = (
            "is not possible with secure_aggregation and data.worker_local: each client's numbers "
            "would be seen; evaluate rows that all may see in a run of its own"
        )
        yield Violation("evaluation", text)
    if records_clients:
        text = "is not possible with secure_aggregation: the steps of single clients would be seen"
        yield Violation("recording.client_steps", text)
