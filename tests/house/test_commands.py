"""Commands that the documentation shows can be given: programs, targets and options are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.processes import options
from tests.house.pages import INLINE_CODE, PAGES, blocks, prose
from tests.repository import ROOT

OPTION = re.compile(r"--?[a-z][\w-]*")
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"\$\(([A-Z]+)\)", MAKEFILE))
SEVERAL = re.compile(r"&&|\||;")


def given(text: str) -> Iterator[list[str]]:
    """The words of every command in lines of a shell, without what stands before the program."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in SEVERAL.split(line.partition(" # ")[0]):
            words = command.split()
            while words and (words[0] == "sudo" or "=" in words[0]):
                words.pop(0)
            if words:
                yield words


def shown(page: Path) -> Iterator[list[str]]:
    for text in (*blocks(page, "sh"), *INLINE_CODE.findall(prose(page))):
        yield from given(text)


def wrong(words: list[str]) -> str:
    """What is wrong with a command of ours; "" where nothing is, or it is not ours."""
    asked = [word.partition("=")[0] for word in words if OPTION.match(word)]
    match words:
        case ["make", *targets]:
            named = {word.partition("=")[0] for word in targets if OPTION.match(word) is None}
            unknown = named - TARGETS - VARIABLES
            return f"make has no {unknown}" if unknown else ""
        case ["python" | ".venv/bin/python", script, *_] if script.endswith(".py"):
            path = ROOT / script
            text = path.read_text() if path.exists() else ""
            unknown = {option for option in asked if f'"{option}"' not in text}
            return f"{script} has no {unknown}" if unknown or not text else ""
        case ["stratagem" | ".venv/bin/stratagem", verb, *more] if OPTION.match(verb) is None:
            group = [name for name in options() if name.startswith(f"{verb} ")]
            name = f"{verb} {more[0]}" if group and more else verb
            if group and not more:
                return ""
            unknown = set(asked) - options().get(name, frozenset())
            return f"{name} has no {unknown}" if unknown or name not in options() else ""
    return ""


def test_commands_in_the_documentation_can_be_given() -> None:
    for name, page in PAGES.items():
        assert [text for words in shown(page) if (text := wrong(words))] == [], name


def test_an_example_says_how_it_is_run() -> None:
    for path in (ROOT / "examples").glob("*.yaml"):
        comments = re.findall(r"^#.*?  +(stratagem .*)$", path.read_text(), re.M)
        commands = [words for text in comments for words in given(text)]
        assert any(f"examples/{path.name}" in words for words in commands), path
        assert [wrong(words) for words in commands if wrong(words)] == [], path


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("make tset", "make has no {'tset'}"),
        ("python benchmarks/nothing.py", "benchmarks/nothing.py has no"),
        ("sudo python benchmarks/soak.py --hours 3", "--hours"),
        ("A=1 stratagem run job.yaml && stratagem rnu job.yaml", "rnu has no"),
        ("stratagem certs init certs --wroker w0", "certs init has no {'--wroker'}"),
        ("stratagem worker --name w0 \\\n  --alow x", "worker has no {'--alow'}"),
        ("stratagem certs; make check test; stratagem worker --no-metrics-tls --name=w0", ""),
    ],
)
def test_a_command_that_cannot_be_given_is_found(line: str, told: str) -> None:
    assert told in "".join(map(wrong, given(line)))
