"""Facts come back from the journal as they went in, also those of earlier schemas and rules; and
what people read of each: in the log, in the events of a run, and in its status."""

import json
import math
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest, Party, RunId, WorkerId
from stratagem.common.numerics.rules import CURRENT, FIRST, KEEPS_DTYPES, check_numerics
from stratagem.common.numerics.verification import Conclusion
from stratagem.coordinator.core import fact_text
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import CancelRun, ResumeRun, SubmitRun
from stratagem.coordinator.core.decide import decide
from stratagem.coordinator.core.fact_text import (
    MAX_METRICS,
    decode,
    encode,
    metrics_text,
    payload_now,
    sentence,
)
from stratagem.coordinator.core.facts import (
    ROOT,
    Evaluated,
    Noted,
    RunCancelled,
    RunSubmitted,
    SegmentCommitted,
)
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    built,
    digest,
    finished,
    member,
    start,
)

pytestmark = pytest.mark.core


COMMITTED = SegmentCommitted(
    party=ROOT, segment=1, step=2, digest=Digest("0" * 64), size_bytes=3, metrics={}
)
TAKEN = {"client": 1, "digest": "d", "num_samples": 2}
CLOSED = {
    "party": "",
    "round_num": 1,
    "accepted": [],
    "reason": "all",
    "by_policy": False,
    "metrics": {},
}


def test_each_schema_between_is_passed_and_those_that_changed_nothing_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rename(payload: dict[str, Any]) -> dict[str, Any]:
        return {"reason": payload["why"]}

    monkeypatch.setattr(fact_text, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(fact_text, "UPGRADES", {("RunCancelled", 2): rename})
    assert decode("RunCancelled", 1, '{"why":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("RunCancelled", 3, '{"reason":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("SegmentCommitted", 1, encode(COMMITTED)[1]) == COMMITTED


@pytest.mark.parametrize(
    ("kind", "schema"), [("RunCancelled", fact_text.SCHEMA_VERSION + 1), ("RunPainted", 1)]
)
def test_what_a_newer_version_wrote_is_refused(kind: str, schema: int) -> None:
    with pytest.raises(ValueError, match=f"{kind} of schema {schema}, written by a newer version"):
        decode(kind, schema, "{}")


def test_metrics_that_are_not_finite_come_back() -> None:
    metrics = {"test.loss": math.nan, "test.perplexity": math.inf, "test.gap": -math.inf}
    kind, payload = encode(Evaluated(party=ROOT, segment=3, metrics=metrics | {"a": 0.1}))
    json.loads(payload, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    fact = decode(kind, 1, payload)
    assert isinstance(fact, Evaluated)
    assert {name: str(value) for name, value in fact.metrics.items()} == {
        "test.loss": "nan",
        "test.perplexity": "inf",
        "test.gap": "-inf",
        "a": "0.1",
    }


def test_a_plain_value_that_is_not_finite_is_refused_where_it_is_told_of() -> None:
    """It would be a number until a replay makes the text of it that stands in the journal."""
    with pytest.raises(ValueError, match=r"scores\[1\]: nan is not a finite number"):
        Noted(party=ROOT, kind="chosen", data={"scores": [0.5, math.nan]})
    noted = Noted(party=ROOT, kind="chosen", data={}, metrics={"test.loss": math.nan})
    with pytest.raises(ValueError, match="rate: inf is not a finite number"):
        noted.model_copy(update={"data": {"rate": math.inf}})
    with pytest.raises(ValueError, match="segment"):
        noted.model_copy(update={"segment": "first"})
    kind, payload = encode(noted.model_copy(update={"data": {"rate": 0.5}}))
    assert str(decode(kind, 1, payload)) == str(noted.model_copy(update={"data": {"rate": 0.5}}))


def test_null_for_a_number_and_halves_of_surrogates_are_read_and_what_says_all_is_shown() -> None:
    """Only one of two readers of JSON knows the latter."""
    fact = decode("Evaluated", 1, '{"party":"","segment":3,"metrics":{"test.loss":null}}')
    assert isinstance(fact, Evaluated)
    assert math.isnan(fact.metrics["test.loss"])
    assert decode("RunCancelled", 1, '{"reason":"\\ud800"}') == RunCancelled(reason="\ud800")
    now = '{"reason": "no reason", "by": ""}'
    assert payload_now("RunCancelled", decode("RunCancelled", 1, now), now) is now


@pytest.mark.parametrize(
    ("kind", "stored", "shown"),
    [
        ("RunCancelled", '{"reason": "x"}', {"reason": "x", "by": ""}),
        (
            "Evaluated",
            '{"party": "", "segment": 3, "metrics": {"a": null}, "predictions": "", "without": []}',
            {"party": "", "segment": 3, "metrics": {"a": "NaN"}, "predictions": "", "without": []},
        ),
        (
            "RoundClosed",
            json.dumps(CLOSED | {"accepted": [TAKEN]}),
            CLOSED | {"accepted": [{**TAKEN, "staleness": 0, "base": ""}]},
        ),
    ],
    ids=["a field is missing", "null is a number", "a part may lack a field"],
)
def test_another_payload_is_shown_as_this_version_writes_it(
    kind: str, stored: str, shown: dict[str, Any]
) -> None:
    assert json.loads(payload_now(kind, decode(kind, 1, stored), stored)) == shown


# ---- the number of the rules that decide a run's bits: given at submit, kept to the end ----


def test_a_new_run_gets_the_newest_number_and_keeps_it() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert simulation.record.numerics == CURRENT
    simulation.tell(CancelRun(RUN))
    simulation.tell(ResumeRun(RUN))
    assert simulation.record.numerics == CURRENT
    old = decode("RunSubmitted", 1, '{"job_json": "{}", "wall_s": 0.0}')
    assert isinstance(old, RunSubmitted)
    assert old.numerics == FIRST


@pytest.mark.parametrize(
    ("numerics", "means"), [(FIRST, "Single"), (KEEPS_DTYPES - 1, "Single"), (KEEPS_DTYPES, None)]
)
def test_a_run_without_a_precision_means_what_its_rules_say(
    numerics: int, means: str | None
) -> None:
    text = job_text({"type": "Local"})
    assert "precision" not in text
    simulation = Simulation()
    fact = RunSubmitted(job_json=text, wall_s=0.0, numerics=numerics)
    simulation.state = apply(simulation.state, RUN, fact, 0.0)
    assert simulation.record.job.execution.precision == means
    assert decide(simulation.state, SubmitRun(RUN, text, 0.0)) == ()  # the call is repeated


def test_no_number_is_the_first_and_one_that_is_not_known_is_refused() -> None:
    assert [check_numerics(number) for number in (0, FIRST, CURRENT)] == [FIRST, FIRST, CURRENT]
    with pytest.raises(InvalidInputError, match=f"numerics: {CURRENT + 1} is not known here"):
        check_numerics(CURRENT + 1)


# ---- what is said of a fact ----


COPIED = f.Copied(member=1, donor=0, digest=digest("d"), step=5, params={"optimizer.lr": 0.1})
EVALUATED = {"test.loss": 0.25, "test.accuracy": 0.9}


def assigned(*pairs: tuple[int, str]) -> f.ClientsAssigned:
    assignments = tuple(
        f.Assignment(client=client, member=member(name) if name else None) for client, name in pairs
    )
    return f.ClientsAssigned(party=f.ROOT, round_num=3, membership=1, assignments=assignments)


def generation(**changes: Any) -> f.GenerationClosed:
    known: dict[str, Any] = {"party": f.ROOT, "generation": 2, "scores": (0.5, None), "best": 0}
    known |= {"digest": digest("g"), "step": 10, "metrics": {}, "params": {}}
    return f.GenerationClosed(**known | changes)


def evolved(score: float | None, copied: f.Copied | None = None) -> f.MemberEvolved:
    return f.MemberEvolved(party=f.ROOT, generation=2, member=1, score=score, copied=copied)


def trained(step: int = 20, **changes: Any) -> f.SegmentFinished:
    return finished(2, step, 1, **{"loss": 0.5, "metrics": EVALUATED} | changes)


def evaluated(**changes: Any) -> f.Evaluated:
    return f.Evaluated(party=f.ROOT, segment=4, metrics={"test.loss": 0.25}, **changes)


def forgotten(*names: str) -> f.WorkersForgotten:
    return f.WorkersForgotten(names=tuple(map(WorkerId, names)))


def noted(reason: str = "") -> f.Noted:
    return f.Noted(party=f.ROOT, kind="paused", data={}, reason=reason)


SAID: list[tuple[f.Fact, str]] = [
    (
        trained(loss=math.nan, metrics={f.SKIPPED_STEPS: 10}),
        "segment 2 trained to step 20: train.loss nan (warning: none of its steps was applied, for "
        "no loss or no gradient was finite; lower optimizer.lr, or look at the data), "
        "train.skipped_steps 10",
    ),
    (forgotten("a", "b"), "forgotten, as they were lost long ago: a, b"),
    (
        forgotten(*(f"w{number}" for number in range(11))),
        "forgotten, as they were lost long ago: w0, w1, w2, w3, w4, w5, w6, w7 and 3 more",
    ),
    (trained(), "segment 2 trained to step 20: train.loss 0.5, test.accuracy 0.9, test.loss 0.25"),
    (
        trained(metrics={}, num_redone_steps=1),
        "segment 2 trained to step 20: train.loss 0.5 (1 step done again)",
    ),
    (trained(step=0), "segment 2 evaluated: test.accuracy 0.9, test.loss 0.25"),
    (evaluated(), "segment 4 evaluated: test.loss 0.25"),
    (
        evaluated(without=(1, 3)),
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
        built(
            num_parameters=4810,
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
    (f.DataUploaded(owner="token ci", digest=digest("d")), f"token ci has uploaded {digest('d')}"),
    (f.RunPinned(run_id=RunId("r"), is_pinned=True, by="token ci"), "r pinned by token ci"),
    (f.RunPinned(run_id=RunId("r"), is_pinned=False), "r unpinned"),
    (
        f.VerificationEnded(
            run_id=RunId("r"),
            conclusion=Conclusion.EQUAL,
            num_equal=7,
            num_unverified=0,
            workers=(WorkerId("w"),),
            wall_s=1.0,
            by="token ci",
        ),
        "r verified: EQUAL, 7 equal digests by token ci",
    ),
    (f.BlobsHeld(listed=digest("d"), until_s=1.0, by="token ci"), "a backup was begun by token ci"),
    (f.RunExpired(reason="it ended 90 days ago"), "deleted: it ended 90 days ago"),
    (noted(), "paused"),
    (noted("at night"), "paused: at night"),
    *(
        (
            f.RoundClosed(party=f.ROOT, round_num=1, accepted=(), reason=reason, by_policy=False),
            said,
        )
        for reason, said in (
            ("round 1: 2 of 3 updates", "round 1 closed: 2 of 3 updates"),
            ("round 11: 2 of 3 updates", "round 1 closed: round 11: 2 of 3 updates"),
            ("all updates are here", "round 1 closed: all updates are here"),
        )
    ),
]


@pytest.mark.parametrize(("fact", "said"), SAID, ids=lambda each: type(each).__name__)
def test_a_fact_is_told_in_one_sentence(fact: f.Fact, said: str) -> None:
    assert sentence(fact) == said


def test_metrics_are_sorted_by_name_and_of_many_a_sentence_has_a_few() -> None:
    assert metrics_text({"b": 1 / 3, "a": 2.0}) == "a 2, b 0.333333"
    assert metrics_text({"a": 2.0, "train.loss": 1.0}) == "train.loss 1, a 2"
    many = {f"test.m{number:02}": 0.5 for number in range(30)}
    shown = ", ".join(f"{name} 0.5" for name in sorted(many)[:MAX_METRICS])
    of_many = f.Evaluated(party=f.ROOT, segment=1, metrics=many)
    assert sentence(of_many) == f"segment 1 evaluated: {shown}, 22 more metrics"
    assert metrics_text(dict(list(many.items())[:MAX_METRICS])) == shown
    assert metrics_text(dict(list(many.items())[: MAX_METRICS + 1])).endswith(", 1 more metric")
    assert metrics_text({**many, "train.loss": 2.0}).startswith("train.loss 2, test.m00 0.5")
