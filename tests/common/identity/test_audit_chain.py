"""Lines that cannot be changed, removed or put in without a later one showing it."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import IntegrityError
from stratagem.common.identity.audit import (
    GENESIS,
    check_lines,
    hashes,
    line_of,
    parsed,
    torn_record,
)

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


@settings(max_examples=40)
@given(RECORDS)
@example([])
def test_a_chain_is_whole_and_names_its_head(records: list[dict[str, Any]]) -> None:
    lines = chain(records)
    checked = check_lines(lines)
    assert (checked.num_lines, checked.num_torn, checked.is_torn) == (len(lines), 0, False)
    assert checked.head == (list(hashes(lines))[-1] if lines else GENESIS)
    for line, record in zip(lines, records, strict=True):
        kept = parsed(line[:-1])
        assert {key: kept[key] for key in record} == record


def refused(lines: list[bytes], number: int, said: str = "") -> None:
    with pytest.raises(IntegrityError, match=rf"^line {number} was changed{said}"):
        check_lines(lines)


@pytest.mark.parametrize("number", range(5))
def test_a_line_that_is_changed_or_gone_is_found(number: int) -> None:
    before, line, after = NUMBERED[:number], NUMBERED[number], NUMBERED[number + 1 :]
    for place in (0, 8, 20, -2):
        changed = bytearray(line)
        changed[place] ^= 1
        refused([*before, bytes(changed), *after], number + 1)
    if after:  # which shows it
        head = parsed(before[-1][:-1])["hash"] if before else GENESIS
        refused([*before, line_of({"kind": "round", "rows": 99}, head), *after], number + 1)
        refused([*before, *after], max(1, number))


def test_other_orders_other_spellings_and_what_is_no_record_are_found() -> None:
    swapped = [NUMBERED[0], NUMBERED[2], NUMBERED[1], *NUMBERED[3:]]
    refused(swapped, 1, ": line 2 follows another one")
    spaced = [NUMBERED[0].replace(b'"rows":0', b'"rows": 0'), *NUMBERED[1:]]
    refused(spaced, 1, ": it is no line of an audit")
    for text in (b"[]", b"7", b"", b"\xff", b'{"hash":"a"}', b"{" * 9999):
        refused([text + b"\n"], 1)


def test_the_beginning_of_a_line_at_the_end_is_said_and_no_change() -> None:
    for size in (1, 30, len(NUMBERED[-1]) - 1):
        checked = check_lines([*NUMBERED[:-1], NUMBERED[-1][:size]])
        assert checked.is_torn
        assert checked.num_lines == 4
    lines = chain([{"kind": "offer"}, torn_record(b'{"at":'), {"kind": "offer"}])
    assert check_lines(lines).num_torn == 1, "one that stands for a torn one is counted"
    assert parsed(lines[1][:-1])["torn_bytes"] == 6
