"""What the line about a run says, at every width."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from stratagem.client.course.views import Event, Phase, Progress
from stratagem.client.terminal.followed import FollowedRun
from stratagem.client.terminal.line import live_line, plain_line
from stratagem.client.terminal.tables import (
    MAX_METRICS,
    bar_text,
    duration_text,
    metrics_text,
    number_text,
)
from tests.client.terminal.items import (
    closed,
    fact,
    finished,
    generation,
    rejected,
    selected,
    steps,
    update,
)

pytestmark = pytest.mark.core


def followed(*items: Event | Progress, strategy: str = "Local", of: int = 5) -> FollowedRun:
    run = FollowedRun("mine-1", "mine", strategy, "test.accuracy", num_segments=of)
    for item in items:
        run.update(item)
    return run


def line_of(*items: Event | Progress, strategy: str = "Local", width: int = 200) -> str:
    return str(live_line(followed(*items, strategy=strategy), width))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.834, "2.83"),
        (1.5, "1.50"),
        (0.0432, "0.0432"),
        (123.4, "123"),
        (45678.0, "45,678"),
        (1.2e-7, "1.20e-07"),
        (3.0e9, "3.00e+09"),
        (-0.5, "-0.500"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number_text(value) == text


def test_a_bar_is_filled_by_half_cells() -> None:
    bars = [bar_text(done, 4) for done in (0.0, 0.13, 0.5, 1.0, 1.7)]
    assert bars == ["────", "╸───", "━━──", "━━━━", "━━━━"]


def test_a_run_of_steps() -> None:
    assert line_of(finished(1), steps(150, metrics={"train.distance": 0.125})) == (
        "mine  ━━━─────────  25%  step 150/600  loss 2.83  1,210 rows/s  "
        "test.accuracy 0.900  test.loss 0.250  train.distance 0.125"
    )
    late = steps(150, training_phase="PREDICT", strategy_phase="WARMUP", num_skipped_steps=2)
    assert line_of(late, fact("Noted")) == (
        "mine  ━━━─────────  25%  step 150/600  warmup  predict  loss 2.83  1,210 rows/s  "
        "2 steps skipped"
    )


def test_a_pipeline_says_how_much_of_a_step_its_workers_wait() -> None:
    assert line_of(finished(1, metrics={}), steps(150, bubble=0.184)).endswith(
        "1,210 rows/s  bubble 18%"
    )
    assert "bubble" not in line_of(finished(1), steps(150))


def test_epoch_learning_rate_and_time_left() -> None:
    at = steps(150, epoch=1.25, lr=0.042, eta_s=130.0, elapsed_s=9.0)
    assert line_of(finished(1, metrics={}), at) == (
        "mine  ━━━─────────  25%  epoch 2/5  step 150/600  loss 2.83  lr 0.042  1,210 rows/s  "
        "2:10 left"
    )
    assert line_of(finished(1, metrics={}), replace(at, may_end_early=True)).endswith(
        "at most 2:10 left"
    )
    # Seven steps of an epoch, and 2.5 epochs in all.
    assert "epoch 2/3" in line_of(fact("ModelBuilt"), steps(14, of=17, epoch=14 / 7))
    # What stays: the time left goes after all that is optional.
    run = followed(finished(1), at)
    assert str(live_line(run, 60)) == "mine  ━━━─────────  25%  step 150/600  loss 2.83  2:10 left"
    assert str(live_line(run, 36)) == "mine  25%  step 150/600  loss 2.83"


def test_only_what_is_done_is_a_hundred_percent() -> None:
    counts = ((229, 230, "99%"), (230, 230, "100%"), (29, 100, "29%"))
    for step, of, percent in counts:
        run = followed(fact("ModelBuilt"), steps(step, of=of))
        assert f" {percent}  step {step}/{of}" in str(live_line(run, 200))
        assert plain_line(run).startswith(f"mine-1  {percent}  step {step}/{of}")


def test_times_are_short() -> None:
    texts = [duration_text(seconds) for seconds in (0.4, 130, 3730, 4e6)]
    assert texts == ["0:00", "2:10", "1:02:10", "46 days"]


@pytest.mark.parametrize(("loss", "text"), [(0.0, "loss 0"), (math.nan, "loss nan")])
def test_a_loss_of_zero_and_one_that_is_no_number_are_shown(loss: float, text: str) -> None:
    line = line_of(fact("ModelBuilt"), steps(150, loss=loss))
    assert line.split("  ")[4] == text
    # A segment tells the mean over its steps, which is not what the line says of a step.
    assert "loss 2.83" in line_of(steps(150), finished(1, loss="NaN"))
    assert "loss" not in line_of(fact("ModelBuilt"), steps(0, loss=math.nan), steps(0, loss=0.0))


def test_a_run_that_only_evaluates_has_no_loss() -> None:
    run = followed(finished(1, step=0, loss=0.0), of=2)
    assert str(live_line(run, 200)) == (
        "mine  ━━━━━━──────  50%  segment 1/2  test.accuracy 0.900  test.loss 0.250"
    )


def test_a_run_that_waits_says_for_what() -> None:
    waiting = fact("RunSubmitted", Phase.PLACING, "waits for 2 workers")
    assert line_of(waiting) == "mine  PLACING  waits for 2 workers"
    reason = steps(0, reason="partition 0 needs tag gpu")
    assert line_of(waiting, reason) == "mine  PLACING  partition 0 needs tag gpu"
    assert line_of(finished(1), reason) == "mine  RUNNING  partition 0 needs tag gpu"
    assert "step 7/600" in line_of(finished(1), reason, steps(7))
    lost = fact("MembersFormed", Phase.RECOVERING, "members are nobody")
    assert line_of(steps(3), lost) == "mine  RECOVERING  members are nobody"


def test_a_resumed_run_counts_from_its_commit() -> None:
    back = fact("RunResumed", from_segment=1, step=100)
    assert "step 100/600" in line_of(steps(300), finished(3), back)
    assert "step 300" in line_of(steps(300), finished(3), fact("RunResumed", from_segment=None))


FEDERATED = "Federated/FedAvg"


def test_a_federation_counts_rounds_and_clients() -> None:
    items = [selected(1), update(1, 0), closed(1, [0], train_loss=1.5), selected(2)]
    assert line_of(*items, strategy=FEDERATED) == (
        "mine  ━━──────────  20%  round 2/5  0 of 4 done  loss 1.50"  # of the round before
    )
    # The mean over samples, of those that are done; what is of another round is not counted.
    items += [update(2, 0, 1.0, 30), update(2, 1, 2.0, 10), update(1, 3), rejected(2, 2)]
    assert line_of(*items, strategy=FEDERATED) == (
        "mine  ━━──────────  20%  round 2/5  2 of 4 done, 1 rejected  loss 1.25"
    )
    again = fact("RoundWaits", round_num=2, reason="too few", asked_again=[2])
    assert "2 of 4 done  loss" in line_of(*items, again, strategy=FEDERATED)
    items += [closed(2, [0, 1], train_loss=1.75), update(2, 3), rejected(2, 3)]
    assert line_of(*items, strategy=FEDERATED) == (
        "mine  ━━━━╸───────  40%  round 2/5  2 of 4 done, 1 late, 1 rejected  loss 1.75"
    )
    assert "loss nan" in line_of(*items, closed(2, [0, 1], train_loss="NaN"), strategy=FEDERATED)


def test_a_private_federation_has_no_loss_and_says_what_is_spent() -> None:
    items = [fact("RoundAccounted", round_num=1), selected(1), update(1, 0), closed(1, [0])]
    assert "loss" not in line_of(*items, strategy=FEDERATED)
    spent = {"privacy.epsilon": 2.94, "privacy.clip_norm": 0.5}
    committed = fact("SegmentCommitted", segment=1, step=1, digest="d", metrics=spent)
    assert "privacy.epsilon 2.94" in line_of(*items, committed, strategy=FEDERATED)


def test_the_bar_of_a_federation_does_not_go_back_while_a_round_is_aggregated() -> None:
    """A round is closed before its state is committed, which is what progress counts."""
    items: list[Event | Progress] = [selected(1), update(1, 0), closed(1, [0], train_loss=1.5)]
    late = steps(0, of=5, segment=0, strategy_phase="AGGREGATING")
    assert line_of(*items, late, strategy=FEDERATED).startswith(
        "mine  ━━──────────  20%  round 1/5  1 of 4 done, 3 late  aggregating  loss 1.50"
    )
    # Of the round before, when the next one has begun.
    assert "aggregating" not in line_of(*items, selected(2), late, strategy=FEDERATED)
    back = fact("RunResumed", from_segment=0, step=0)
    assert "  0%  " in line_of(*items, late, back, selected(1), strategy=FEDERATED)
    population = (generation(1, [0.5], 0), steps(0, segment=0))
    assert " 20%  generation 1/5" in line_of(*population, strategy="PopulationBased/Truncation")


def test_late_clients_of_earlier_rounds_are_counted() -> None:
    late = steps(1, num_clients=4, num_clients_late=2, segment=1, loss=0.0)
    assert (
        line_of(selected(2), late, strategy=FEDERATED)
        .partition("  0 of")[2]
        .startswith(" 4 done, 2 late")
    )


def test_a_federation_that_is_seen_from_the_middle_on() -> None:
    assert line_of(closed(3, train_loss=1.5), strategy=FEDERATED) == (
        "mine  ━━━━━━━─────  60%  round 3/5  loss 1.50"
    )
    # A version before the round's metrics: the mean of the updates.
    items = [selected(1), update(1, 0, 1.0), closed(1, [0])]
    assert line_of(*items, strategy=FEDERATED).endswith("loss 1.00")


def test_a_population_names_its_best_member() -> None:
    formed = fact("PopulationFormed", params=[{}] * 3)
    one = fact("SegmentCommitted", party="member1", segment=1, step=20)
    inner = fact("SegmentCommitted", party="member2/silo0", segment=1, step=20)
    strategy = "PopulationBased/Truncation"
    assert line_of(formed, one, inner, one, strategy=strategy) == (
        "mine  ────────────   0%  generation 0/5  1 of 3 members trained"
    )
    end = generation(1, [0.5, 0.94, None], best=1, copies=2)
    assert line_of(formed, one, end, strategy=strategy) == (
        "mine  ━━──────────  20%  generation 1/5  best 0.940 (member 1)  2 copied"
    )
    invalid = generation(2, [None, None, None], best=0)
    assert "best invalid (member 0)" in line_of(formed, invalid, strategy=strategy)


def test_no_single_client_and_no_member_speaks_for_the_run() -> None:
    member = finished(4, party="member2", loss=9.0, metrics={"test.accuracy": 0.1})
    run = followed(finished(1), member, strategy="PopulationBased/Truncation")
    assert (run.segment, run.mean_loss, run.metrics["test.accuracy"]) == (1, 0.5, 0.9)


def test_where_there_is_no_terminal_the_line_has_the_id_and_no_bar() -> None:
    run = followed(finished(1), steps(150))
    assert plain_line(run).startswith("mine-1  25%  step 150/600  loss 2.83  1,210 rows/s  test")
    assert plain_line(followed()) == "mine-1  PENDING"


def test_of_many_metrics_a_line_has_a_few_and_says_how_many_more_there_are() -> None:
    many = {f"test.metric_{n:02}": 0.5 for n in range(65)}
    text = plain_line(followed(finished(1, metrics=many), steps(150, metrics=many)))
    assert text.count("test.metric_") == 2 * MAX_METRICS
    assert text.count("57 more metrics") == 2
    assert len(text) < 600
    one_more = dict(list(many.items())[: MAX_METRICS + 1])
    assert plain_line(followed(finished(1, metrics=one_more), steps(150))).endswith("1 more metric")
    found = metrics_text(many | {"test.worst": 0.1}, "test.worst", in_short=True)
    assert found.startswith("test.worst 0.1  test.metric_00 0.5  ")
    assert found.endswith("test.metric_06 0.5  58 more metrics")
    assert metrics_text(many).count("test.metric_") == 65
    with_loss = metrics_text(many | {"train.loss": 0.2}, "test.metric_09", in_short=True)
    assert with_loss.startswith("train.loss 0.2  test.metric_09 0.5  test.metric_00 0.5  ")
    assert with_loss.endswith("test.metric_05 0.5  58 more metrics")


LONG = steps(143, 212, training_phase="PREDICT", metrics={"train.distance": 1.0, "ä漢": 2.0})


def test_fields_go_from_the_right_and_what_matters_stays() -> None:
    run = followed(finished(1), LONG)
    shown = {width: str(live_line(run, width)) for width in (72, 53, 45, 37, 31, 20)}
    assert shown == {
        72: "mine  ━━━━━━━━────  67%  step 143/212  predict  loss 2.83  1,210 rows/s",
        53: "mine  ━━━━━━━━────  67%  step 143/212  loss 2.83",
        45: "mine  ━━╸─  67%  step 143/212  loss 2.83",
        37: "mine  67%  step 143/212  loss 2.83",
        31: "mine  67%  step 143/212",
        20: "mine  67%",
    }


@settings(max_examples=40)
@given(
    width=st.integers(19, 300),
    name=st.text("abc-漢\n\x1b", min_size=1, max_size=64),
    items=st.lists(
        st.sampled_from(
            [
                *(finished(2), LONG, steps(3, reason="waits\n" * 30), selected(2), update(2, 1)),
                *(closed(2), generation(1, [0.5], 0), fact("RunResumed", Phase.RECOVERING)),
            ]
        )
    ),
    strategy=st.sampled_from(["Local", FEDERATED, "PopulationBased/Truncation"]),
)
def test_it_is_always_one_line_that_fits(
    width: int, name: str, items: list[Event | Progress], strategy: str
) -> None:
    run = replace(followed(*items, strategy=strategy), name=name)
    line = live_line(run, width).plain
    assert line
    assert "\n" not in line
    assert cell_len(line) <= width
