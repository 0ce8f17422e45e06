"""The output that README shows is that of the tutorial, which is executed."""

import re

from docs.execute_tutorials import VARIES
from tests.repository import ROOT

BLOCK = re.compile(r"^```text\n(starting a coordinator.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = "..."


def normal(text: str) -> list[str]:
    """Return the lines without what is another one at each run, and without the job's name."""
    return [
        VARIES.sub("?", line) for line in text.replace("digits-allreduce", "digits").split("\n")
    ]


def test_each_line_of_the_readme_is_printed_and_none_is_left_out_without_a_word() -> None:
    [block] = BLOCK.findall((ROOT / "README.md").read_text())
    shown = normal((ROOT / "docs/tutorials/first-run.md").read_text())
    place, may_skip = shown.index(normal(block)[0]), False
    for line in normal(block.rstrip("\n")):
        if line == LEFT_OUT:
            may_skip = True
            continue
        found = shown.index(line, place)
        assert may_skip or found == place, f"README leaves out {shown[place:found]}"
        place, may_skip = found + 1, False
