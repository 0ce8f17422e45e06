"""What the package asks of others: ranges that end, and that hold what the tests are run with."""

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"dev", "kubernetes", "ray"}
"""Extras for those who work on this code; their versions are those of constraints.txt."""
ASKED = [
    each
    for extra, texts in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
    for each in map(Requirement, texts)
    if extra not in TOOLS and each.name != PROJECT["name"]
]
PINNED = {
    name.lower().replace("_", "-"): version
    for name, _, version in (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
}


def test_a_range_ends_and_holds_the_version_that_is_run() -> None:
    for asked in ASKED:
        assert {each.operator for each in asked.specifier} == {">=", "<"}, asked
        assert asked.specifier.contains(PINNED[asked.name.lower()]), asked


@pytest.mark.parametrize(
    ("suffix", "extra"), [("", "dev"), ("-kubernetes", "kubernetes"), ("-ray", "ray")]
)
def test_a_lock_file_has_the_hashes_of_what_is_pinned(suffix: str, extra: str) -> None:
    """Change constraints.txt or an extra, then `make lock`."""
    entries = (ROOT / f"requirements{suffix}.lock").read_text().replace("\\\n", "").splitlines()
    locked = {}
    for package, _, rest in (entry.partition("==") for entry in entries):
        assert "--hash=sha256:" in rest, package
        locked[package] = rest.split()[0]
    assert locked == {package: PINNED[package] for package in locked}
    for asked in map(Requirement, PROJECT["optional-dependencies"][extra]):
        assert asked.name == PROJECT["name"] or asked.name.lower() in locked, asked
