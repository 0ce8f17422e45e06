"""What the program `stratagem` begins before it has imported its commands."""

import pytest

from stratagem.program.__main__ import _starts_cluster


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("run job.yaml --local 2", True),
        ("run --local=2 job.yaml", True),
        ("resume r --local 2", True),
        ("up", True),
        ("up --workers 3", True),
        ("run job.yaml", False),
        ("run job.yaml --local 2 --help", False),
        ("up --help", False),
        ("check job.yaml --local", False),
        ("", False),
    ],
)
def test_a_command_that_starts_a_cluster_is_known_by_its_words(line: str, starts: bool) -> None:
    assert _starts_cluster(line.split()) is starts
