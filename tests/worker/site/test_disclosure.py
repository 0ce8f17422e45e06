"""What a site tells: of an error that a job does not fit its model, and of others no word; of
metrics of the job itself those that its file allows, of their values, of what these were computed
from, and of those of all sites."""

import importlib
from pathlib import Path

import pytest
from torch import nn

from stratagem.common.base.errors import InvalidInputError, UnfitModelError
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.models.build import checks_of_the_model
from stratagem.worker.plans.client_state import check_personal
from stratagem.worker.site.disclosure import CodePlaces, Disclosure
from tests.worker.site.jobs import offered

SITE = Disclosure("anna", frozenset(), True, shares_logs=False, shares_messages=False)
WITHHELD = "site anna keeps the message in its own log"


def test_a_pattern_that_fits_no_tensor_is_told_with_the_names_that_there_are() -> None:
    """And other wrong input is not."""
    job = offered(options={"personal": ["head.*"]})
    with pytest.raises(UnfitModelError) as caught, checks_of_the_model():
        check_personal(job, nn.Sequential(nn.Linear(2, 1)))
    told = SITE.error(caught.value, CodePlaces("", frozenset()), "building")
    assert told.message == (
        "strategy.options.personal[0]: 'head.*' fits no tensor of the model; the first are "
        "0.weight, 0.bias"
    )
    error = InvalidInputError.at("data.train", "Smith, Anna has no label")
    told = SITE.error(error, CodePlaces("", frozenset()), "loading data")
    assert told.message.endswith(WITHHELD)
    assert "Anna has" not in told.message


def test_code_of_the_job_cannot_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spilling_loader.py").write_text(
        "from stratagem.common.base.errors import UnfitModelError\n\n"
        "def load():\n    raise UnfitModelError('Smith, Anna')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("spilling_loader")
    with pytest.raises(UnfitModelError) as caught:
        module.load()
    told = SITE.error(caught.value, CodePlaces("", frozenset({"spilling_loader"})), "building")
    assert told.message.endswith(f"UnfitModelError at spilling_loader.py, line 4; {WITHHELD}")


def test_of_a_thread_that_stays_at_one_thing_neither_line_nor_row_is_told() -> None:
    stall = pb.Stall(seconds=75, activity="fetching row 7 of data.train", place="a.py, line 4")
    assert SITE.stall(stall, "training") == pb.Stall(seconds=75, activity="training")
    assert SITE.stall(pb.Stall(), "training") == pb.Stall()


SAID = {"test.task:f1": 0.5, "test.task:f1.micro": 0.25, "test.task:f10": 0.75, "test.other:x": 1.0}


@pytest.mark.parametrize(
    ("allowed", "tells", "told"),
    [
        ({"task:f1"}, True, {"test.task:f1", "test.task:f1.micro"}),
        ({"accuracy"}, True, set()),
        ({"task:f1"}, False, set()),
    ],
)
def test_only_allowed_ones_are_told(allowed: set[str], tells: bool, told: set[str]) -> None:
    sums = [pb.MetricState(metric=name, name="hits", counts=[3]) for name in SAID if "." in name]
    own = pb.OwnMetrics(metrics=SAID, are_measured=True, sums=sums)
    result = pb.ExecuteResult(evaluate=pb.EvaluateResult(own_metrics=own))
    site = Disclosure("anna", frozenset(allowed), tells, shares_logs=False, shares_messages=False)
    found = site.result(result).evaluate
    assert found.own_metrics.metrics == {name: SAID[name] for name in told}
    assert {state.metric for state in found.own_metrics.sums} == told
    merged = site.result(pb.ExecuteResult(measure_sums=own)).measure_sums
    assert merged.metrics == found.own_metrics.metrics
    assert found.HasField("own_metrics") == bool(told)
