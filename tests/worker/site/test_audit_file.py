"""The audit file: each line on the disk, one after the other, whatever was left by a crash."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.audit import check_lines
from stratagem.worker.site.audit import AuditFile

pytestmark = pytest.mark.core


def records(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as lines:
        assert not check_lines(lines).is_torn
    return [json.loads(line) for line in path.read_text().splitlines()]


def promise(run: str, epsilon: float | None, data: str = "xray") -> dict[str, Any]:
    return {"kind": "round", "run": run, "data": data, "epsilon": epsilon}


def test_lines_are_added_after_those_of_another_process(tmp_path: Path) -> None:
    """The very first of which may be cut off; and one that is too long is not written."""
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"kind"')
    AuditFile(path).add({"kind": "offer"})
    again = AuditFile(path)
    with pytest.raises(Exception, match=r"a line of the audit has \d+ bytes"):
        again.add({"reason": "x" * 70_000})
    again.add({"kind": "round"})
    assert [record["kind"] for record in records(path)] == ["torn", "offer", "round"]
    path.unlink()
    AuditFile(path).add({"kind": "offer"})
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [1, 9, -2])
def test_what_a_crash_has_cut_off_is_said_in_its_place(tmp_path: Path, size: int) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditFile(path)
    audit.add({"kind": "offer"})
    whole = path.read_bytes()
    audit.add({"kind": "round", "rows": 7})
    torn = path.read_bytes()[: len(whole) + size] if size > 0 else path.read_bytes()[:size]
    path.write_bytes(torn)
    AuditFile(path).add({"kind": "round", "rows": 7})
    kinds = [record["kind"] for record in records(path)]
    assert kinds == ["offer", "torn", "round"]
    assert records(path)[1]["torn_bytes"] == len(torn) - len(whole)
    with path.open("rb") as lines:
        assert check_lines(lines).num_torn == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *(
            ("audit.jsonl", text, r"audit.file: .*move the file away, and keep it")
            for text in (b"hello\n", b'{"kind":"offer"}\n', b"\n")
        ),
        ("audit.jsonl", bytes(1 << 20), "it is no audit"),
        ("none/audit.jsonl", b"", r"audit.file: .*No such file or directory"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_no_audit_is_refused_at_the_start(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        AuditFile(tmp_path / name)
    assert path.read_bytes() == content


def test_epsilon_is_that_of_other_runs_by_data_set(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditFile(path)
    for record in (promise("a", 3.0), promise("a", 3.0), promise("b", 2.0), promise("c", None)):
        audit.add(record)
    audit.add(promise("b", 1.0, data="ct"))
    audit.add({"kind": "offer", "run": "d", "data": "xray", "epsilon": 9.0})  # nothing left
    assert audit.spent("a") == {"xray": 2.0, "ct": 1.0}
    assert audit.spent("new") == {"xray": 5.0, "ct": 1.0}
    AuditFile(path).add(promise("e", 0.5))  # another worker of the site
    assert audit.spent("new")["xray"] == 5.5


def _add(path: Path, number: int) -> None:
    audit = AuditFile(path)
    for line in range(20):
        audit.add({"kind": "offer", "worker": number, "line": line})


def test_workers_of_a_site_may_share_it(tmp_path: Path) -> None:
    path, context = tmp_path / "audit.jsonl", multiprocessing.get_context("spawn")
    other = context.Process(target=_add, args=(path, 0))
    other.start()
    _add(path, 1)
    other.join()
    assert other.exitcode == 0
    assert len(records(path)) == 40


def test_rounds_of_protected_rows_are_counted_by_their_noise(tmp_path: Path) -> None:
    """A round that was done again counts once; one that was asked for again from another state, or
    under a number that had been, counts as one more."""
    audit = AuditFile(tmp_path / "audit.jsonl")
    for noise in ("a", "b", "b", "c"):
        audit.add({**promise("r", 1.0), "noise": noise})
    audit.add({**promise("r", 1.0, data="other"), "noise": "d"})
    audit.add({**promise("s", 1.0), "noise": "e"})
    audit.add({**promise("r", 1.0), "kind": "offer", "noise": "f"})
    audit.add(promise("r", 1.0))
    assert audit.noises("r", "xray") == {"a", "b", "c"}
    assert AuditFile(tmp_path / "audit.jsonl").noises("s", "xray") == {"e"}
    assert audit.noises("unknown", "xray") == frozenset()
