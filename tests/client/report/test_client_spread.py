"""The spread of a metric over clients, where the metric is shown."""

from types import SimpleNamespace
from typing import Any

from stratagem.client.report.run import LinesFolding
from stratagem.client.terminal.line import evaluation_texts
from stratagem.client.terminal.tables import metrics_text
from stratagem.common.base.text import SHARES

OWN = "test.task:f1"


def spread(name: str, low: float, high: float) -> dict[str, float]:
    values = (low, low, (low + high) / 2, high, high)
    return {f"{name}.{last}": value for last, value in zip(SHARES, values, strict=True)}


METRICS = {
    "test.accuracy": 0.8,
    **spread("test.accuracy", 0.5, 0.9),
    f"{OWN}.client_mean": 0.7,
    **spread(OWN, 0.25, 0.75),
    "test.loss": 1.0,
}


def event(segment: int, metrics: dict[str, float]) -> Any:
    payload = {"party": "", "segment": segment, "metrics": metrics}
    return SimpleNamespace(kind="Evaluated", payload=payload, time_s=0.0, index=segment)


def test_curves_have_it_as_a_band() -> None:
    folding = LinesFolding()
    folding.fold(event(1, METRICS))
    folding.fold(event(2, METRICS | spread("test.accuracy", 0.6, 1.0)))
    lines = folding.lines
    assert set(lines) == {"test.accuracy", f"{OWN}.client_mean", "test.loss"}
    assert (lines["test.accuracy"].low, lines["test.accuracy"].high) == ([0.5, 0.6], [0.9, 1.0])
    assert (lines[f"{OWN}.client_mean"].low, lines["test.loss"].low) == ([0.25, 0.25], ())


def test_a_curve_of_rounds_of_which_some_have_none_has_no_band() -> None:
    folding = LinesFolding()
    folding.fold(event(1, METRICS))
    folding.fold(event(2, {"test.accuracy": 0.9}))
    assert folding.lines["test.accuracy"].low == ()


def test_lines_of_text_have_it_as_a_range() -> None:
    assert metrics_text(METRICS) == (
        f"test.accuracy 0.8 (0.5 to 0.9)  test.loss 1  {OWN}.client_mean 0.7 (0.25 to 0.75)"
    )
    run: Any = SimpleNamespace(metrics=METRICS, scored_by="test.loss")
    assert evaluation_texts(run)[1].endswith("(0.500 to 0.900)")
    assert len(evaluation_texts(run)) == 3
