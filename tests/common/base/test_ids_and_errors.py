"""Ids are spelled one way; errors keep their parts."""

from __future__ import annotations

import pickle

import pytest

from stratagem.common.base.errors import (
    InvalidInputError,
    RunFailedError,
    StratagemError,
    UserCodeError,
    Violation,
)
from stratagem.common.base.ids import check_run_id, check_worker_id, new_incarnation, new_run_id

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("name", "slug"),
    [("Digits Run_2!", "digits-run-2"), ("---", "run"), ("", "run"), ("x" * 99, "x" * 55)],
)
def test_a_new_run_id_is_a_slug_and_eight_hex_digits(name: str, slug: str) -> None:
    run_id = new_run_id(name)
    assert check_run_id(run_id) == run_id
    assert run_id[:-9] == slug
    assert int(run_id[-8:], 16) >= 0
    assert new_run_id(name) != run_id
    assert new_incarnation() != new_incarnation()


def test_wrong_ids_are_refused() -> None:
    for value in ("", "A", "a b", "a/b", "a\n", "x" * 65, "ä"):
        with pytest.raises(InvalidInputError, match="run_id"):
            check_run_id(value)
    for value in ("", "..", ".", "a b", "a/b", "a\n", "x" * 65):
        with pytest.raises(InvalidInputError, match="worker_id"):
            check_worker_id(value)
    assert check_worker_id("Node-1.example_2") == "Node-1.example_2", "as hosts are called"


def test_invalid_input_is_a_value_error_with_all_violations() -> None:
    error = InvalidInputError(violations=[Violation("a.b", "missing"), Violation("", "empty")])
    assert isinstance(error, ValueError)
    assert str(error) == "a.b: missing; empty"
    assert InvalidInputError.at("x", "bad").violations == (Violation("x", "bad"),)
    assert str(InvalidInputError("job.yaml: nothing")) == "job.yaml: nothing"
    user_error = UserCodeError("KeyError", "'x'", "", "w0", "training step 17")
    assert str(user_error) == "KeyError: 'x' (while training step 17) on w0"
    assert str(UserCodeError("KeyError", "'x'")) == "KeyError: 'x'"


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError.at("x", "bad"),
        RunFailedError("round 3: 2 of 4 updates, deadline passed"),
        UserCodeError("KeyError", "'x'", "Traceback ...", "w0", "training step 17"),
    ],
)
def test_errors_survive_a_process_boundary(error: StratagemError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
