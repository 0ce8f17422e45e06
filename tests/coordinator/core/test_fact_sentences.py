"""What people read of each fact: in the log, in the events of a run, and in its status."""

import math

import pytest

from stratagem.common.base.ids import Digest, Party, RunId, WorkerId
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.fact_messages import MAX_METRICS, metrics_text, sentence
from tests.coordinator.core.simulation import digest, member

pytestmark = pytest.mark.core

COPIED = f.Copied(member=1, donor=0, digest=digest("d"), step=5, params={"optimizer.lr": 0.1})


def finished(**changes: object) -> f.SegmentFinished:
    known: dict[str, object] = {
        "party": f.ROOT,
        "segment": 2,
        "step": 20,
        "membership": 1,
        "loss": 0.5,
        "num_rows": 100,
        "seconds": 1.0,
        "engine": "solo",
        "metrics": {"test.loss": 0.25, "test.accuracy": 0.9},
    }
    return f.SegmentFinished.model_validate(known | changes)


def assigned(*pairs: tuple[int, str]) -> f.ClientsAssigned:
    assignments = tuple(
        f.Assignment(client=client, member=member(name) if name else None) for client, name in pairs
    )
    return f.ClientsAssigned(party=f.ROOT, round_num=3, membership=1, assignments=assignments)


def generation(**changes: object) -> f.GenerationClosed:
    known: dict[str, object] = {
        "party": f.ROOT,
        "generation": 2,
        "scores": (0.5, None),
        "best": 0,
        "digest": digest("g"),
        "step": 10,
        "metrics": {},
        "params": {},
    }
    return f.GenerationClosed.model_validate(known | changes)


def evolved(score: float | None, copied: f.Copied | None = None) -> f.MemberEvolved:
    return f.MemberEvolved(party=f.ROOT, generation=2, member=1, score=score, copied=copied)


SAID: list[tuple[f.Fact, str]] = [
    (
        finished(loss=math.nan, metrics={f.SKIPPED_STEPS: 10}),
        "segment 2 trained to step 20: train.loss nan (warning: none of its steps was applied, for "
        "no loss or no gradient was finite; lower optimizer.lr, or look at the data), "
        "train.skipped_steps 10",
    ),
    (
        f.WorkersForgotten(names=(WorkerId("a"), WorkerId("b"))),
        "forgotten, as they were lost long ago: a, b",
    ),
    (
        f.WorkersForgotten(names=tuple(WorkerId(f"w{number}") for number in range(11))),
        "forgotten, as they were lost long ago: w0, w1, w2, w3, w4, w5, w6, w7 and 3 more",
    ),
    (
        finished(),
        "segment 2 trained to step 20: train.loss 0.5, test.accuracy 0.9, test.loss 0.25",
    ),
    (
        finished(metrics={}, num_redone_steps=1),
        "segment 2 trained to step 20: train.loss 0.5 (1 step done again)",
    ),
    (
        finished(step=0),
        "segment 2 evaluated: test.accuracy 0.9, test.loss 0.25",
    ),
    (
        f.Evaluated(party=f.ROOT, segment=4, metrics={"test.loss": 0.25}),
        "segment 4 evaluated: test.loss 0.25",
    ),
    (
        f.Evaluated(party=f.ROOT, segment=4, metrics={"test.loss": 0.25}, without=(1, 3)),
        "segment 4 evaluated without client 1, client 3, away too long: test.loss 0.25",
    ),
    (
        assigned((0, "b"), (1, "a"), (2, "b"), (3, "")),
        "round 3: clients assigned: a trains 1; b trains 0, 2; nobody trains 3",
    ),
    (
        f.MembersFormed(party=Party("client1"), membership=2, members=(), reason="a lost"),
        "client1: members are nobody (a lost)",
    ),
    (evolved(None), "generation 2: member 1 scores invalid"),
    (evolved(0.5, COPIED), "generation 2: member 1 scores 0.5; member 1 copies member 0"),
    (generation(), "generation 2: scores 0.5, invalid; member 0 is best"),
    (
        generation(params={"optimizer.lr": 0.1}, copied=(COPIED,)),
        "generation 2: scores 0.5, invalid; member 0 is best with optimizer.lr 0.1; "
        "member 1 copies member 0",
    ),
    (
        f.ModelBuilt(
            party=f.ROOT,
            digest=digest("m"),
            size_bytes=1,
            num_rows={"train": 1},
            num_parameters=4810,
            layout_digest="x",
            structural=("model.kwargs.width",),
            conversion="Single converts 2 tensors",
            warning="batches of 64 rows, of which there are 8",
        ),
        "model built: 4,810 parameters; what it is made of depends on model.kwargs.width; "
        "execution.precision: Single converts 2 tensors; "
        "warning: batches of 64 rows, of which there are 8",
    ),
    (
        f.RoundWaits(party=f.ROOT, round_num=1, reason="1 of 4 updates", asked_again=(2, 3)),
        "1 of 4 updates; the round waits; asked again: 2, 3",
    ),
    (
        f.DataUploaded(owner="token ci", digest=Digest("ab" * 32)),
        f"token ci has uploaded {'ab' * 32}",
    ),
    (f.RunPinned(run_id=RunId("r"), is_pinned=True, by="token ci"), "r pinned by token ci"),
    (f.RunPinned(run_id=RunId("r"), is_pinned=False), "r unpinned"),
    (
        f.BlobsHeld(listed=Digest("ab" * 32), until_s=1.0, by="token ci"),
        "a backup was begun by token ci",
    ),
    (f.RunExpired(reason="it ended 90 days ago"), "deleted: it ended 90 days ago"),
    (f.Noted(party=f.ROOT, kind="paused", data={}), "paused"),
    (f.Noted(party=f.ROOT, kind="paused", data={}, reason="at night"), "paused: at night"),
]


@pytest.mark.parametrize(("fact", "said"), SAID, ids=lambda each: type(each).__name__)
def test_a_fact_is_told_in_one_sentence(fact: f.Fact, said: str) -> None:
    assert sentence(fact) == said


def test_metrics_are_sorted_by_name_and_short_after_the_loss_of_the_training() -> None:
    assert metrics_text({"b": 1 / 3, "a": 2.0}) == "a 2, b 0.333333"
    assert metrics_text({"a": 2.0, "train.loss": 1.0}) == "train.loss 1, a 2"


MANY = {f"test.m{number:02}": 0.5 for number in range(30)}


def test_of_many_metrics_a_sentence_has_a_few_and_says_how_many_more_there_are() -> None:
    shown = ", ".join(f"{name} 0.5" for name in sorted(MANY)[:MAX_METRICS])
    evaluated = f.Evaluated(party=f.ROOT, segment=1, metrics=MANY)
    assert sentence(evaluated) == f"segment 1 evaluated: {shown}, 22 more metrics"
    assert metrics_text(dict(list(MANY.items())[:MAX_METRICS])) == shown
    assert metrics_text(dict(list(MANY.items())[: MAX_METRICS + 1])).endswith(", 1 more metric")
    assert metrics_text({**MANY, "train.loss": 2.0}).startswith("train.loss 2, test.m00 0.5")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("round 1: 2 of 3 updates", "round 1 closed: 2 of 3 updates"),
        ("round 11: 2 of 3 updates", "round 1 closed: round 11: 2 of 3 updates"),
        ("all updates are here", "round 1 closed: all updates are here"),
    ],
)
def test_a_round_that_is_closed_is_named_once(reason: str, said: str) -> None:
    closed = f.RoundClosed(party=f.ROOT, round_num=1, accepted=(), reason=reason, by_policy=False)
    assert sentence(closed) == said
