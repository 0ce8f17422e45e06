"""Every job that a test here sees refused is refused once more, with other faults beside: one
answer must have all of them."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec

ELSEWHERE: dict[str, Any] = {"retention": 0, "colour": "red", "recording": {"steps": 1}}
FIELDS = ("retention", "colour", "recording.steps", "strategy.options.colour")


@pytest.fixture(autouse=True)
def answered_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = JobSpec.parse.__func__  # type: ignore[attr-defined]

    def parse_twice(cls: type[JobSpec], document: Any) -> JobSpec:
        try:
            return parse(cls, document)  # type: ignore[no-any-return]
        except InvalidInputError as error:
            if isinstance(document, dict) and len(error.violations) < 50:
                check_again(cls, document, error)
            raise

    def check_again(cls: type[JobSpec], document: dict[str, Any], error: InvalidInputError) -> None:
        beside = {key: value for key, value in ELSEWHERE.items() if key not in document}
        strategy = document.get("strategy")
        if isinstance(strategy, dict) and isinstance(strategy.get("options", {}), dict):
            options = {**strategy.get("options", {}), "colour": "red"}
            beside["strategy"] = {**strategy, "options": options}
        with pytest.raises(InvalidInputError) as again:
            parse(cls, {**document, **beside})
        told = [(each.field, each.message) for each in again.value.violations]
        lost = [each for each in error.violations if (each.field, each.message) not in told]
        assert not lost, f"only {told} is said of {document}"
        assert len(set(told)) == len(told)
        expected = {(each.field) for each in error.violations}
        assert {field for field, _ in told} - expected <= set(FIELDS), told

    monkeypatch.setattr(JobSpec, "parse", classmethod(parse_twice))
