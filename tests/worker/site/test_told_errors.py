"""What a site tells of an error: that a job does not fit its model, and of others no word."""

import importlib
from pathlib import Path

import pytest
from torch import nn

from stratagem.common.base.errors import InvalidInputError, UnfitModelError
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.models.model_fit import checks_of_the_model
from stratagem.worker.plans.federated.client_state import check_personal
from stratagem.worker.site.disclosure import Disclosure
from stratagem.worker.site.error_place import CodePlaces
from tests.worker.site.jobs import offered

SITE = Disclosure("anna", frozenset(), True, shares_logs=False, shares_messages=False)
WITHHELD = "site anna keeps the message in its own log"


def test_a_pattern_that_fits_no_tensor_is_told_with_the_names_that_there_are() -> None:
    job = offered(options={"personal": ["head.*"]})
    with pytest.raises(UnfitModelError) as caught, checks_of_the_model():
        check_personal(job, nn.Sequential(nn.Linear(2, 1)))
    told = SITE.error(caught.value, CodePlaces("", frozenset()), "building")
    assert told.message == (
        "strategy.options.personal[0]: 'head.*' fits no tensor of the model; the first are "
        "0.weight, 0.bias"
    )


def test_other_wrong_input_is_not_told() -> None:
    error = InvalidInputError.at("data.train", "Smith, Anna has no label")
    told = SITE.error(error, CodePlaces("", frozenset()), "loading data")
    assert told.message.endswith(WITHHELD)
    assert "Anna has" not in told.message


def test_code_of_the_job_cannot_say_it_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    stall = pb.Stall(
        seconds=75, activity="fetching row 7 of data.train", place="a.py, line 4, in f"
    )
    assert SITE.stall(stall, "training") == pb.Stall(seconds=75, activity="training")
    assert SITE.stall(pb.Stall(), "training") == pb.Stall()
