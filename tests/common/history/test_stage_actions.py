"""What a stage has done in a step, as values of the step history and back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.history.recording import (
    MAX_ACTIONS,
    MAX_SERIES,
    NONE,
    StageAction,
    StageReport,
    is_of_newest_segment,
    is_series_name,
    party_of_stage,
    told,
)

UNIT_S = 2.0**-20
TIMES = st.integers(min_value=0, max_value=1 << 30).map(lambda units: units * UNIT_S)
WAITS = st.one_of(st.just(0.0), st.integers(11, 1 << 20).map(lambda units: units * UNIT_S))


@st.composite
def reports(draw: st.DrawFn) -> StageReport:
    kinds = st.sampled_from(["forward", "backward", "input", "weight"])
    others = st.sampled_from([("exchange", NONE), ("optimizer", NONE)])
    keys = draw(st.lists(st.tuples(kinds, st.integers(0, 99)) | others, unique=True, max_size=20))
    actions = []
    for key in keys:
        first, last = sorted((draw(TIMES), draw(TIMES)))
        actions.append(StageAction(*key, first, last, draw(WAITS)))
    actions.sort(key=lambda each: (each.begin_s, each.end_s))
    sources = sorted(draw(st.sets(st.integers(0, 7), max_size=3)))
    return StageReport(
        draw(st.integers(0, 7)), sources, actions, draw(TIMES), draw(st.integers(0, (1 << 32) - 1))
    )


@settings(max_examples=40)
@given(reports())
def test_a_report_is_what_its_values_say(report: StageReport) -> None:
    again = StageReport.of(report.values)
    key = {each: (each.begin_s, each.end_s, each.kind, each.micro_batch) for each in again.actions}
    assert sorted(again.actions, key=key.__getitem__) == sorted(report.actions, key=key.__getitem__)
    assert (again.rank, again.sources) == (report.rank, report.sources)
    assert (again.began_s, again.clock) == (report.began_s, report.clock)
    assert all(is_series_name(name) for name in report.values)


def test_times_are_whole_units_and_what_is_incomplete_or_unknown_is_left_out() -> None:
    action = StageAction("forward", 3, 0.1, 0.2, 5e-6)
    values = StageReport(1, [0], [action]).values
    assert abs(values["action.forward.3.begin_s"] - 0.1) <= UNIT_S / 2
    assert (values["action.forward.3.begin_s"] / UNIT_S).is_integer()
    assert "action.forward.3.wait_s" not in values, "as long as a look at the clock"
    del values["action.forward.3.end_s"]
    hostile = {"action.forward.x.begin_s": 1.0, "busy_s": 2.0, "action.from.": 1.0}
    assert StageReport.of({**values, **hostile}).actions == []


def test_of_many_micro_batches_every_so_many_are_told_with_the_first_and_the_last() -> None:
    for count in (1, 2, 31, 32, 100, 1000, 4096):
        for kinds in (["forward", "backward"], ["forward", "input", "weight"]):
            actions = [
                *(StageAction(kind, n, n, n + 1.0, 1.0) for n in range(count) for kind in kinds),
                StageAction("exchange", NONE, 5e3, 6e3),
                StageAction("optimizer", NONE, 6e3, 7e3),
            ]
            chosen = told(actions)
            numbers = sorted({each.micro_batch for each in chosen} - {NONE})
            assert (numbers[0], numbers[-1]) == (0, count - 1)
            assert len(chosen) <= MAX_ACTIONS
            if len(actions) <= MAX_ACTIONS:
                assert chosen == actions
            else:
                assert len(chosen) > MAX_ACTIONS / 3, "no more is left out than has to be"
            assert [each.micro_batch for each in chosen].count(NONE) == 2
            assert len(StageReport(0, range(8), chosen).values) <= MAX_SERIES
    assert told([]) == []


def test_only_parties_of_actions_are_kept_of_the_newest_segment_alone() -> None:
    assert is_of_newest_segment(party_of_stage(3))
    assert is_of_newest_segment(f"client1/{party_of_stage(12)}")
    for party in ("", "stage/3", "actions", "member3", "client1/stage/0", "actions/0/x"):
        assert not is_of_newest_segment(party)
