"""No call is missing from the attacks, and each says in its proto what it answers."""

import pytest

from tests.hostile.promises import Code, documented, methods
from tests.hostile.samples import Target, samples
from tests.jobs import job

pytestmark = pytest.mark.core

OF_ALL = {
    Code.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED,
    Code.PERMISSION_DENIED,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.UNAVAILABLE,
    Code.INTERNAL,
}


def test_every_call_has_a_valid_conversation() -> None:
    valid = samples(Target("kept", "victim", job()))
    names = [each.name for each in methods()]
    assert sorted(valid) == sorted(names)
    assert len(set(names)) == len(names)
    for each in methods():
        assert all(type(message) is each.request for message in valid[each.name]), each


def test_the_codes_of_all_calls_are_documented() -> None:
    codes = {str(each): documented(each) for each in methods()}
    assert not [name for name, said in codes.items() if Code.UNKNOWN in said or not said >= OF_ALL]
