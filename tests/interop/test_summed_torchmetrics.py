"""Metrics of torchmetrics over clients: which of them are merged, and their values."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.worker.objectives.own_metrics import SummedState, fill, num_summed, read

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.interop

OUTPUTS = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(23) % 4


def kinds() -> list[tuple[Any, int]]:
    kind, mean = torchmetrics.classification, torchmetrics.MeanMetric
    both = torchmetrics.MetricCollection
    return [
        (mean(), 2),
        (torchmetrics.MaxMetric(), 0),
        (torchmetrics.R2Score(), 4),
        (torchmetrics.PearsonCorrCoef(), 0),
        (kind.MulticlassConfusionMatrix(4), 16),
        (kind.MulticlassAUROC(4), 0),
        (kind.MulticlassAUROC(4, thresholds=3), 48),
        (kind.MulticlassF1Score(4, multidim_average="samplewise"), 0),
        (mean() + 1, 0),
        (torchmetrics.wrappers.MinMaxMetric(mean()), 0),
        (torchmetrics.wrappers.ClasswiseWrapper(kind.MulticlassAccuracy(4, average=None)), 0),
        (both([mean()]), 2),
        (both([mean(), torchmetrics.MaxMetric()]), 0),
    ]


def test_only_metrics_whose_whole_state_is_added_up_are_merged() -> None:
    found = [(type(metric).__name__, num_summed(metric)) for metric, _ in kinds()]
    assert found == [(type(metric).__name__, number) for metric, number in kinds()]


def collection() -> Any:
    """Two of its three metrics share their states once they have seen rows."""
    kind = torchmetrics.classification
    return torchmetrics.MetricCollection(
        {
            "f1": kind.MulticlassF1Score(num_classes=4),
            "recall": kind.MulticlassRecall(num_classes=4),
            "curve": kind.MulticlassAUROC(num_classes=4, thresholds=5),
        }
    )


@pytest.mark.parametrize("cuts", [[0, 23], [0, 1, 8, 23], [0, 7, 7, 23]])
@pytest.mark.filterwarnings("error::UserWarning:torchmetrics")
def test_a_collection_over_clients_has_the_bits_of_one_loop(cuts: list[int]) -> None:
    one, totals = collection(), dict[str, np.ndarray]()
    for start, end in pairwise(cuts):
        if start == end:
            continue  # a client without rows says nothing
        one.update(OUTPUTS[start:end], TARGETS[start:end])
        own = collection()
        own.update(OUTPUTS[start:end], TARGETS[start:end])
        for state in read("test.a:f", own):
            totals[state.name] = state.values + totals.get(state.name, 0)
    merged = collection()
    fill("a:f", merged, [SummedState("test.a:f", *item) for item in totals.items()])
    found, expected = merged.compute(), one.compute()
    assert {name: float(found[name]) for name in expected} == {
        name: float(value) for name, value in expected.items()
    }
