"""The program that answers the client's questions about a job."""

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.tools.planning.__main__ import answer
from tests.tools.planning.support import kind_job


def test_a_device_that_is_none_is_refused_by_name() -> None:
    request = {
        "question": "estimate",
        "job_json": kind_job("mlp").canonical_json(),
        "device": "cud",
    }
    with pytest.raises(InvalidInputError, match="device: 'cud' is not one of cpu, cuda; did you"):
        answer(request)
