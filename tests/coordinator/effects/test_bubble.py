"""The bubble of a pipeline, from what its ranks say of their latest steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.coordinator.effects.segment import ShownProgress
from stratagem.coordinator.observe.feed import SegmentProgress
from stratagem.v1.worker_pb2 import Progress


def shown(ranks: tuple[int, ...]) -> tuple[ShownProgress, list[SegmentProgress]]:
    made: list[SegmentProgress] = []
    feed: Any = SimpleNamespace(set_progress=lambda _run_id, progress: made.append(progress))
    members = ("a", "b") if ranks else ("a",)
    effect: Any = SimpleNamespace(run_id="r", party="", ranks=ranks, members=members, num_skipped=0)
    return ShownProgress(feed, effect, {}), made


def test_it_is_what_no_rank_has_computed_once_all_have_said_how_long_they_did() -> None:
    pipeline, made = shown((0, 1))
    pipeline.show(0, Progress(step=1, busy_s=3.0, span_s=4.0))
    assert made[-1].bubble is None
    pipeline.show(1, Progress(step=1, busy_s=2.0, span_s=3.0))
    assert len(made) == 1, "the first one's progress is shown"
    pipeline.show(0, Progress(step=2, busy_s=3.0, span_s=5.0))
    assert made[-1].bubble == pytest.approx(1 - 5 / 10)
    pipeline.show(1, Progress(step=3, busy_s=9.0, span_s=3.0))
    pipeline.show(0, Progress(step=3, busy_s=5.0, span_s=5.0))
    assert made[-1].bubble == 0.0, "of different steps it may not add up"


def test_what_is_no_pipeline_has_none() -> None:
    alone, made = shown(())
    alone.show(0, Progress(step=1, busy_s=0.0, span_s=0.0))
    assert made[-1].bubble is None
