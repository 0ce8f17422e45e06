"""Compare a persistent map with a dict, after every change."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.coordinator.core import persistent_map
from stratagem.coordinator.core.persistent_map import PersistentMap

_keys = st.text(alphabet="abcd", max_size=4)


@given(changes=st.lists(st.tuples(_keys, st.none() | st.integers()), max_size=300))
def test_it_is_a_dict_that_never_changes(changes: Sequence[tuple[str, int | None]]) -> None:
    expected: dict[str, int] = {}
    made = PersistentMap[str, int]()
    passed = [(made, dict(expected))]
    for key, value in changes:
        if value is None:
            expected.pop(key, None)
            made = made.without(key)
        else:
            expected[key] = value
            made = made.with_item(key, value)
        passed.append((made, dict(expected)))
    for each, at_once in passed:
        assert each == at_once
        assert len(each) == len(list(each)) == len(at_once)
        assert sorted(each.values()) == sorted(at_once.values())
        assert PersistentMap(at_once) == each
    first, second = passed[len(passed) // 2], passed[-1]
    missing = object()
    assert second[0].changed_since(first[0]) == {
        key
        for key in first[1].keys() | second[1].keys()
        if first[1].get(key, missing) is not second[1].get(key, missing)
    }


def test_keys_whose_hashes_are_the_same_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_map, "_place", lambda key: 7)
    made = PersistentMap({f"{number}": number for number in range(100)})
    made = made.with_item("x", 100).without("50")
    assert sorted(made.values()) == [*range(50), *range(51, 101)]
    assert made["99"] == 99
    assert repr(made) == repr(dict(made))
    assert "50" not in made


def test_what_has_not_changed_is_shared() -> None:
    made = PersistentMap({f"worker-{number}": object() for number in range(10_000)})
    value = object()
    changed = made.with_item("worker-77", value)
    assert changed.changed_since(made) == {"worker-77"}
    shared = sum(one is other for one, other in zip(made._root, changed._root, strict=True))
    assert shared == len(made._root) - 1
