"""How far a failed run has come, in the same words everywhere."""

import pytest

from stratagem.client.course.members import failed_step, failure_text


@pytest.mark.parametrize(
    ("activity", "step"),
    [
        ("training step 47", 47),
        ("on_step of training step 1203", 1203),
        ("model build", None),
        ("", None),
    ],
)
def test_a_step_is_read_where_it_is_named(activity: str, step: int | None) -> None:
    assert failed_step(activity) == step


@pytest.mark.parametrize(
    ("committed", "activity", "more", "told"),
    [
        (40, "training step 47", {"of": 100}, "committed to step 40 of 100; failed in step 47"),
        (40, "training step 47", {"reached": 45}, "committed to step 40; failed in step 47"),
        (0, "training step 3", {}, "no step committed; failed in step 3"),
        (1200, "evaluation", {"reached": 1234}, "committed to step 1,200; failed after step 1,234"),
        (40, "", {"reached": 40}, "committed to step 40"),
        (0, "model build", {}, "no step committed"),
    ],
)
def test_a_failure_says_what_is_kept_and_where_it_happened(
    committed: int, activity: str, more: dict[str, int], told: str
) -> None:
    assert failure_text(committed, activity, **more) == told
