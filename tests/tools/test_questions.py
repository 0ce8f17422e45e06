"""The program that answers the client's questions about a job."""

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.tools.questions.__main__ import answer
from tests.tools.planning.support import kind_job


def test_a_device_that_is_none_is_refused_by_name() -> None:
    request = {
        "question": "estimate",
        "job_json": kind_job("mlp").canonical_json(),
        "device": "cud",
    }
    with pytest.raises(InvalidInputError, match="device: 'cud' is not one of cpu, cuda; did you"):
        answer(request)


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = {
        "question": "estimate",
        "job_json": kind_job("mlp").canonical_json(),
        "device": "cuda",
    }
    said = "device: cuda is not here; leave the device out for this machine's own"
    with pytest.raises(InvalidInputError, match=said):
        answer(request)
