"""JudgeUpdates: say what each accepted update of a round counts: under a robust rule, or by loss.

The verdict is a fact before anything is folded, so a fold that is done again, also by another
machine with another linear algebra, combines the same updates.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import GeometricMedian, NormBound, RobustRule
from stratagem.coordinator.core.effects import JudgeUpdates
from stratagem.coordinator.core.facts import UpdatesJudged
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.aggregate_round import accepted_entries, decoding_of
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.coordinator.updates.folding.fold import FoldStoppedError
from stratagem.coordinator.updates.robust.verdict import Verdict, judge
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.weighing.fair_shares import Fairness

_MAX_NAMED = 8


async def judge_updates(env: EffectContext, effect: JudgeUpdates) -> None:
    """Compare the updates in a thread, and report UpdatesJudged."""
    job = env.job_of(effect.run_id, effect.party)
    entries = await env.in_thread(lambda: accepted_entries(env, effect))
    cancelled = threading.Event()
    try:
        verdict = await env.in_thread(lambda: _judge(env, effect, job, entries, cancelled))
    except (IntegrityError, FileNotFoundError):
        env.spool.distrust(entries)  # where there is an object store, they are fetched again
        raise
    finally:
        cancelled.set()
    failpoint("coordinator.round.judged")
    clients = [accepted.client for accepted in effect.accepted]
    said = _said(spec_of(job).options.robust, effect.losses, clients, verdict)
    fact = UpdatesJudged(
        party=effect.party,
        round_num=effect.round_num,
        weights=verdict.weights,
        scores=verdict.scores,
        reason=f"round {effect.round_num}: {said}",
    )
    await env.report(effect.run_id, fact)


def _judge(
    env: EffectContext,
    effect: JudgeUpdates,
    job: JobSpec,
    entries: Sequence[SpoolEntry],
    cancelled: threading.Event,
) -> Verdict:
    """Return the verdict; for a thread."""

    def should_stop() -> None:
        if cancelled.is_set():
            raise FoldStoppedError("the comparison of updates was stopped")

    with ExitStack() as files:
        manifest, state = open_state(files, env.blobs, effect.base.digest)
        bases = [effect.base.digest] * len(entries)
        decoding = files.enter_context(closing(decoding_of(env, effect, manifest, bases)))
        sources = [decoding.source(place, entry) for place, entry in enumerate(entries)]
        options = spec_of(job).options
        if options.q is not None:
            fairness = Fairness(options.q, _rate(job), effect.losses)
            return fairness.verdict(sources, manifest, state, should_stop)
        assert options.robust is not None, "no rule asks for a verdict"
        return judge(options.robust, sources, manifest, state, should_stop)


def _rate(job: JobSpec) -> float:
    """Return the learning rate of the clients, which all their parameters have in all rounds."""
    assert job.optimizer is not None, "the job was checked"
    return job.optimizer.lr


def _said(
    rule: RobustRule | None, losses: Sequence[float], clients: Sequence[int], verdict: Verdict
) -> str:
    """Return the verdict as a sentence for people."""
    if rule is None:
        return _said_of_losses(losses, clients, sum(verdict.weights))
    pairs = list(zip(clients, verdict.weights, strict=True))
    updates = counted(len(clients), "update")
    match rule:
        case NormBound(norm=norm):
            shortened = [client for client, share in pairs if share < 1.0]
            return f"{len(shortened)} of {updates} longer than {norm:g}{_named(shortened)}"
        case GeometricMedian():
            lightest = min(verdict.weights) * len(clients)
            return f"{updates} weighed, the lightest with {lightest:.2g} of an even share"
        case _:
            left_out = [client for client, each in pairs if not each]
            kept = len(clients) - len(left_out)
            return f"{kept} of {updates} chosen; left out{_named(left_out) or ': none'}"


def _said_of_losses(losses: Sequence[float], clients: Sequence[int], step: float) -> str:
    """Return who had the least and the greatest loss, and how much of their changes counts."""
    in_order = sorted(zip(losses, clients, strict=True))
    (least, best), (greatest, worst) = in_order[0], in_order[-1]
    return (
        f"losses before training from {least:.4g} (client {best}) to {greatest:.4g} (client "
        f"{worst}); the changes count {step:.3g} in all"
    )


def _named(clients: Sequence[int]) -> str:
    if not clients:
        return ""
    more = f" and {len(clients) - _MAX_NAMED} more" if len(clients) > _MAX_NAMED else ""
    return f": clients {', '.join(map(str, clients[:_MAX_NAMED]))}{more}"
