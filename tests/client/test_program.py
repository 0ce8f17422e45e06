"""What the program `stratagem` begins before it has imported its commands, and what it imports."""

import subprocess
import sys

import pytest

import stratagem.client
from stratagem.program.__main__ import _starts_cluster

IMPORTS = """
import sys
from stratagem.client.cli.main import assemble
assemble(sys.argv[1:])
print(*sorted(set(%r) & sys.modules.keys()))
"""
HEAVY = (
    *("cryptography", "numpy", "packaging", "pathspec", "pydantic", "torch", "yaml"),
    *("stratagem.client.report", "stratagem.common.job"),
)
"""What takes long to import, and most commands do without."""
OF_JOBS = ["pydantic", "stratagem.common.job", "yaml"]


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


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        ("status", []),
        ("certs", []),
        ("run", OF_JOBS),
        ("check", OF_JOBS),
        ("up", OF_JOBS),
        ("verify", ["cryptography", "numpy", "pydantic", *OF_JOBS[1:], "stratagem.client.report"]),
    ],
)
def test_a_command_imports_what_it_needs(command: str, modules: list[str]) -> None:
    words = [sys.executable, "-c", IMPORTS % (HEAVY,), command]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(modules)


def test_the_package_offers_its_names_before_they_are_imported() -> None:
    names = stratagem.client.__all__
    assert dir(stratagem.client) == sorted(names)
    assert all(getattr(stratagem.client, name) is not None for name in names)
    with pytest.raises(AttributeError, match=r"'stratagem\.client' has no attribute 'Nothing'"):
        getattr(stratagem.client, "Nothing")  # noqa: B009
