"""Counters of a coordinator, from the facts of a run that is verified while it trains."""

from collections import Counter

from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.process import metrics
from stratagem.coordinator.runtime.loop import counted_as

DIGEST = Digest("a" * 64)
WORKERS = (WorkerId("a"), WorkerId("b"))


def refuted(conclusion: Conclusion) -> f.SegmentRefuted:
    workers = tuple((worker,) for worker in WORKERS)
    return f.SegmentRefuted(party=f.ROOT, segment=1, step=5, conclusion=conclusion, workers=workers)


def test_verifications_are_counted_by_their_result_and_apart_from_the_run() -> None:
    committed = f.SegmentCommitted(
        party=f.ROOT, segment=1, step=5, digest=DIGEST, size_bytes=1, metrics={}
    )
    verified = f.SegmentVerified(
        party=f.ROOT, segment=1, step=5, digest=DIGEST, workers=WORKERS[1:]
    )
    journaled: list[f.Fact] = [
        *(committed, committed.model_copy(update={"party": VERIFIER}), verified, verified),
        *map(refuted, (Conclusion.RUN, Conclusion.RUN, Conclusion.VERIFIER, Conclusion.OPEN)),
    ]
    counts = Counter(key for fact in journaled for key in counted_as(fact))
    counted = dict(metrics._counted(counts, Counter(), Counter()))
    assert counted[metrics.COMMITS] == {(): 1}
    assert counted[metrics.FACTS]["SegmentCommitted",] == 2
    assert counted[metrics.FACTS]["SegmentRefuted",] == 4
    assert counted[metrics.VERIFICATIONS] == {
        ("verified",): 2,
        ("refuted_run",): 2,
        ("refuted_verifier",): 1,
        ("refuted_job",): 0,
        ("open",): 1,
    }
