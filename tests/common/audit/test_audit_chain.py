"""Lines that cannot be changed, removed or put in without a later one showing it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.audit.audit_chain import (
    GENESIS,
    check_lines,
    hashes,
    line_of,
    parsed,
    torn_record,
)
from stratagem.common.base.errors import IntegrityError

pytestmark = pytest.mark.core

RECORDS = st.lists(
    st.dictionaries(
        st.sampled_from(["kind", "run", "rows", "epsilon", "reason"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(-9, 9),
    ),
    max_size=8,
)


def chain(records: list[dict[str, Any]]) -> list[bytes]:
    lines, head = [], GENESIS
    for record in records:
        lines.append(line_of(record, head))
        head = parsed(lines[-1][:-1])["hash"]
    return lines


NUMBERED = chain([{"kind": "round", "rows": number} for number in range(5)])


@given(RECORDS)
def test_a_chain_is_whole_and_names_its_head(records: list[dict[str, Any]]) -> None:
    lines = chain(records)
    checked = check_lines(lines)
    assert (checked.num_lines, checked.num_torn, checked.is_torn) == (len(lines), 0, False)
    assert checked.head == (list(hashes(lines))[-1] if lines else GENESIS)
    for line, record in zip(lines, records, strict=True):
        kept = parsed(line[:-1])
        assert {key: kept[key] for key in record} == record


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("place", [0, 8, 20, -2])
def test_a_changed_byte_is_found_in_its_line(number: int, place: int) -> None:
    lines = list(NUMBERED)
    changed = bytearray(lines[number])
    changed[place] ^= 1
    lines[number] = bytes(changed)
    with pytest.raises(IntegrityError, match=rf"^line {number + 1} was changed"):
        check_lines(lines)


@pytest.mark.parametrize("number", range(4))
def test_a_line_with_a_hash_of_its_own_is_found_by_the_next_one(number: int) -> None:
    lines, head = list(NUMBERED), parsed(NUMBERED[number - 1][:-1])["hash"] if number else GENESIS
    lines[number] = line_of({"kind": "round", "rows": 99}, head)
    with pytest.raises(IntegrityError, match=rf"^line {number + 1} was changed"):
        check_lines(lines)


@pytest.mark.parametrize("number", range(4))
def test_a_line_that_is_gone_is_missed(number: int) -> None:
    lines = [*NUMBERED[:number], *NUMBERED[number + 1 :]]
    with pytest.raises(IntegrityError, match=rf"^line {max(1, number)} was changed"):
        check_lines(lines)


def test_lines_that_change_places_are_found() -> None:
    lines = [NUMBERED[0], NUMBERED[2], NUMBERED[1], *NUMBERED[3:]]
    with pytest.raises(IntegrityError, match=r"^line 1 was changed: line 2 follows another one"):
        check_lines(lines)


def test_the_same_record_in_another_spelling_is_a_change() -> None:
    lines = [NUMBERED[0].replace(b'"rows":0', b'"rows": 0'), *NUMBERED[1:]]
    with pytest.raises(IntegrityError, match="line 1 was changed: it is no line of an audit"):
        check_lines(lines)


@pytest.mark.parametrize(
    "text", [b"[]\n", b"7\n", b"\n", b"\xff\n", b'{"hash":"a"}\n', b"{" * 9999]
)
def test_what_is_no_record_is_no_line(text: bytes) -> None:
    with pytest.raises(IntegrityError, match="line 1 was changed"):
        check_lines([text if text.endswith(b"\n") else text + b"\n"])


@pytest.mark.parametrize("size", [1, 30, len(NUMBERED[-1]) - 1])
def test_the_beginning_of_a_line_at_the_end_is_said_and_no_change(size: int) -> None:
    checked = check_lines([*NUMBERED[:-1], NUMBERED[-1][:size]])
    assert checked.is_torn
    assert checked.num_lines == 4


def test_a_line_that_stands_for_a_torn_one_is_counted() -> None:
    lines = chain([{"kind": "offer"}, torn_record(b'{"at":'), {"kind": "offer"}])
    assert check_lines(lines).num_torn == 1
    assert parsed(lines[1][:-1])["torn_bytes"] == 6


def test_an_empty_audit_is_whole() -> None:
    assert check_lines([]).head == GENESIS
