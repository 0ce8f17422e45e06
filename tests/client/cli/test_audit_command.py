"""`stratagem audit verify`: whole audits, the first line that was changed, and a head noted
earlier."""

from pathlib import Path

import pytest

from stratagem.common.identity.audit import GENESIS, line_of, parsed, torn_record
from tests.client.cli.command_line import invoke

pytestmark = pytest.mark.core


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """Four lines, of which the third stands for one that a crash has cut off."""
    path, head = tmp_path / "audit.jsonl", GENESIS
    records = ({"kind": "offer"}, {"kind": "round"}, torn_record(b"{"), {"kind": "answer"})
    with path.open("wb") as file:
        for record in records:
            line = line_of(record, head)
            head = parsed(line[:-1])["hash"]
            file.write(line)
    return path


def verified(*arguments: str) -> tuple[int, str, str]:
    done = invoke("audit", "verify", *arguments)
    return done.exit_code, done.stdout, done.stderr


def heads(path: Path) -> list[str]:
    return [parsed(line)["hash"] for line in path.read_bytes().splitlines()]


def test_a_whole_audit_says_how_long_it_is_and_its_head(audit: Path) -> None:
    code, said, _ = verified(str(audit))
    assert code == 0
    assert said.splitlines() == [
        f"{audit}: 4 lines, none changed; last hash {heads(audit)[-1]}",
        "the file notes 1 line that a crash cut off",
    ]


def test_a_line_that_is_being_cut_off_is_no_change_and_a_changed_one_is_named(audit: Path) -> None:
    with audit.open("ab") as file:
        file.write(b'{"kind":')
    code, said, _ = verified(str(audit))
    assert code == 0
    assert "it ends in a line that a crash cut off: nothing of that line has left" in said
    audit.write_bytes(audit.read_bytes().replace(b'"round"', b'"other"'))
    code, said, error = verified(str(audit))
    assert (code, said) == (1, "")
    assert f"{audit}: line 2 was changed: it is not as it was written" in error


def test_a_head_that_was_noted_shows_lines_that_are_gone_and_a_file_that_is_not_there_is_named(
    audit: Path,
) -> None:
    noted = heads(audit)[-1]
    assert verified(str(audit), "--head", noted)[0] == 0
    assert verified(str(audit), "--head", heads(audit)[1])[0] == 0
    audit.write_bytes(b"".join(audit.read_bytes().splitlines(keepends=True)[:-1]))
    assert verified(str(audit))[0] == 0
    code, _, error = verified(str(audit), "--head", noted)
    assert code == 1
    assert f"no line has the hash {noted}: lines have been removed" in error
    code, _, error = verified(f"{audit}.none")
    assert code == 1
    assert "none: No such file or directory" in error
