"""The program that answers the client's questions about a job."""

import itertools
from functools import wraps
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.tools.questions import answer
from tests.jobs import ALLOW, job, user_data
from tests.userland import data


def test_a_device_that_is_none_or_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = {"question": "estimate", "job_json": job().canonical_json()}
    for device, said in (
        ("cud", "device: 'cud' is not one of cpu, cuda; did you"),
        ("cuda", "device: cuda is not here; leave the device out for this machine's own"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            answer({**request, "device": device})


@pytest.mark.parametrize(
    ("question", "changes", "expected"),
    [  # a check makes them a second time, and compares
        ("check", {}, 2),
        ("check", {"execution": {"parallelism": "Automatic"}}, 2),
        ("estimate", {"execution": {"parallelism": "Automatic"}}, 1),
        ("recommend", {}, 1),
    ],
)
def test_data_are_loaded_once_for_all_that_is_played_with_them(
    question: str, changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = itertools.count()
    made = data.classes

    @wraps(made)
    def counted() -> dict[str, data.Rows]:
        next(num_calls)
        return made()

    monkeypatch.setattr(data, "classes", counted)
    request = {
        "question": question,
        "job_json": job(data=user_data("classes"), **changes).canonical_json(),
        "allow": [ALLOW],
        "import_path": [],
        "measure": True,
        "memory_bytes": 1 << 30,
        "num_workers": 2,
    }
    answer(request)
    assert next(num_calls) == expected
