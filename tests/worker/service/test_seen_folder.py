"""A worker says at its registration that it does not see the coordinator's folder of states."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stratagem.common.rpc.channel import PLAINTEXT
from stratagem.common.tensors.leaves import StateFolder
from stratagem.worker.service.diagnosis import say_mismatch, surroundings


@pytest.mark.parametrize(
    ("found", "meant", "said"),
    [
        ("ours", "ours", ""),
        (None, "", ""),
        (None, "ours", "no --state-folder: the coordinator's folder of states (store-id ours) is"),
        ("theirs", "ours", "--state-folder {} has store-id theirs, and the coordinator's has ours"),
        ("", "ours", "--state-folder {} has no store-id, and the coordinator's has ours"),
        ("ours", "", "--state-folder {}: the coordinator has no folder of states for workers"),
    ],
)
def test_a_folder_that_is_not_the_coordinators_is_named(
    tmp_path: Path, found: str | None, meant: str, said: str
) -> None:
    folder = None if found is None else StateFolder(tmp_path)
    if found:
        (tmp_path / "store-id").write_text(f"{found}\n")
    with capture_logs() as lines:
        say_mismatch(folder, meant)
    if not said:
        assert lines == []
        return
    (line,) = lines
    assert (line["log_level"], line["event"]) == ("warning", "states are relayed")
    assert line["reason"].startswith(said.format(tmp_path))


def test_a_folder_that_cannot_be_looked_into_is_said_to_be_so(tmp_path: Path) -> None:
    """And the doctor is told what is seen."""
    (tmp_path / "file").write_text("")
    for name, problem in (("gone", "is not there"), ("file", "cannot be read: Not a directory")):
        folder = StateFolder(tmp_path / name)
        with capture_logs() as lines:
            say_mismatch(folder, "ours")
        text = f"--state-folder {tmp_path / name} {problem}, and the coordinator's has ours"
        assert [line["reason"] for line in lines] == [text]
        assert surroundings(None, PLAINTEXT, folder).state_folder_problem == problem
    (tmp_path / "store-id").write_text("theirs\n")
    seen = surroundings(None, PLAINTEXT, StateFolder(tmp_path))
    assert (seen.state_folder, seen.store_id) == (str(tmp_path), "theirs")
    assert seen.state_folder_problem == surroundings(None, PLAINTEXT).state_folder == ""
