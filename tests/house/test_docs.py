"""What the documentation says about the code is true, as far as a machine can tell."""

import difflib
import re
from functools import cache
from pathlib import Path

import pytest

from docs.error_catalogue import AGAIN, CAUSES, ONLY_A_BASE, classes, sentences
from docs.execute_tutorials import notebook, tutorials, written_outputs
from docs.generate import MARKED, images, render
from stratagem.common.job import load_job
from stratagem.common.rpc.status_codes import TABLE
from tests.house.pages import INLINE_CODE, PAGES, RUNNABLE, blocks, prose
from tests.house.source import PARTS
from tests.repository import ROOT

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
TOP_FOLDERS = "|".join((*PARTS, "protos", "tests", "docs", "examples", "benchmarks", "deploy"))
REPOSITORY_PATH = re.compile(rf"(?:{TOP_FOLDERS})/[\w./*-]*")
NAMES = {kind.__name__ for kind in classes()} - set(ONLY_A_BASE)


@cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = (title.lower().replace("`", "") for title in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w -]", "", title).strip().replace(" ", "-") for title in titles}


def test_generated_parts_are_current() -> None:
    for page in PAGES.values():
        text = page.read_text()
        ends = text.count("<!-- end -->")
        assert text.count("<!-- generated:") == ends == len(MARKED.findall(text)), page
        assert render(text) == text, f"{page}: run `python docs/generate.py`"
    for path, drawn in images().items():
        assert path.read_text() == drawn, f"{path}: run `python docs/generate.py`"


def test_links_and_paths_lead_somewhere() -> None:
    for page in PAGES.values():
        for link in LINK.findall(prose(page)):
            if link.startswith(("http://", "https://")):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"
        for code in INLINE_CODE.findall(prose(page)):
            if REPOSITORY_PATH.fullmatch(code):
                assert any(ROOT.glob(code.rstrip("/"))), f"{page}: {code}"


def test_python_blocks_compile() -> None:
    for page in PAGES.values():
        for source in blocks(page, "python"):
            if not source.startswith("%%"):
                compile(source, str(page), "exec")


def test_jobs_of_examples_and_of_pages_are_valid(tmp_path: Path) -> None:
    written = [
        source.partition("\n")[2]
        for page in tutorials()
        for source in blocks(page, "python")
        if source.startswith("%%writefile") and source.partition("\n")[0].endswith(".yaml")
    ]
    assert len(written) >= 4
    written += [each for page in PAGES.values() for each in blocks(page, "yaml", RUNNABLE)]
    for source in written:
        (tmp_path / "job.yaml").write_text(source)
        load_job(tmp_path / "job.yaml")
    paths = sorted((ROOT / "examples").rglob("*.yaml"))
    assert paths
    for path in paths:
        load_job(path)


def test_tutorials_are_notebooks_with_output_and_no_picture_is_left_over() -> None:
    pytest.importorskip("jupytext", reason="needs the extra dev")
    shown = ""
    for page in tutorials():
        assert notebook(page).cells
        assert any(written_outputs(page)), page
        shown += page.read_text()
    assert tutorials()
    for picture in (ROOT / "docs/images/tutorials").iterdir():
        assert f"../images/tutorials/{picture.name})" in shown, picture


def test_the_tutorial_shows_the_script_and_the_job_that_are_there() -> None:
    folder, page = ROOT / "examples" / "from_script", PAGES["docs/tutorials/from-your-script.md"]
    before, after = ((folder / name).read_text() for name in ("train.py", "task.py"))
    (loop,), (job,) = blocks(page, "python", ".noeval"), blocks(page, "yaml", RUNNABLE)
    assert loop.strip() in before
    assert job.strip() in (folder / "job.yaml").read_text()
    kept = before[: before.index("def main()")]
    changed = [
        line
        for line in difflib.ndiff(kept.splitlines(), after.splitlines())
        if line[0] in "+-" and line[2:].strip() and '"""' not in line
    ]
    assert len(changed) <= 12
    (shown,) = blocks(page, "diff")
    assert {line[0] + line[2:] for line in changed} == {*shown.splitlines()} - {""}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, queue = set[Path](), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in LINK.findall(prose(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists():
                queue.append(target)
    assert not set(PAGES.values()) - reached


def test_every_error_has_a_place_and_a_status_and_sentences_that_are_said() -> None:
    assert set(CAUSES) == set(AGAIN) == NAMES
    expected = {kind for kind in classes() if kind.__name__ not in ONLY_A_BASE}
    assert {kind for kind, _ in TABLE} >= expected
    for name, causes in CAUSES.items():
        for words, advice in causes:
            pattern = re.escape(words).replace("…", r"\S.*")
            assert re.search(pattern, sentences()), f"{name}: nobody says {words!r}"
            assert advice
