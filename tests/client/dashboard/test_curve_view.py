"""Which steps of curves are looked at."""

from typing import Any

import pytest

from stratagem.client.dashboard.values import WHOLE, CurveView


@pytest.mark.parametrize(
    ("view", "steps"),
    [
        (WHOLE, None),
        (CurveView(log=True), None),
        (CurveView(10, 20), (10.0, 20.0)),
        (CurveView(10), (10.0, 100.0)),
        (CurveView(1, 5), (1.0, 5.0)),
        (CurveView(500), (500.0, 501.0)),
    ],
)
def test_a_frame_ends_where_it_was_asked_to_or_where_the_run_has_come_to(
    view: CurveView, steps: Any
) -> None:
    assert view.steps(100) == steps


def test_the_last_picture_of_an_odd_number_fills_both_columns() -> None:
    both = CurveView(columns=2)
    assert [both.width_of(at, 3, 500) for at in range(3)] == [500, 500, 1054]
    assert [both.width_of(at, 2, 500) for at in range(2)] == [500, 500]
    assert WHOLE.width_of(2, 3, 500) == 500
