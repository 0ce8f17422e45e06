"""What the documentation says about the code is true, as far as a machine can tell."""

import difflib
import re
from pathlib import Path

import pytest

from docs.execute_tutorials import notebook, tutorials, written_outputs
from docs.generate import MARKED, images, render
from stratagem.common.job import load_job
from tests.house.pages import INLINE_CODE, PAGES, RUNNABLE, blocks, prose
from tests.repository import ROOT

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
TOP_FOLDERS = (
    "common",
    "coordinator",
    "worker",
    "tools",
    "client",
    "protos",
    "tests",
    "docs",
    "examples",
)
REPOSITORY_PATH = re.compile(rf"(?:{'|'.join(TOP_FOLDERS)}|benchmarks|deploy)/[\w./*-]*")


@pytest.fixture(params=PAGES, name="page")
def _page(request: pytest.FixtureRequest) -> Path:
    return PAGES[request.param]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = (title.lower().replace("`", "") for title in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w -]", "", title).strip().replace(" ", "-") for title in titles}


def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- generated:") == text.count("<!-- end -->") == len(MARKED.findall(text))
    assert render(text) == text, f"{page}: run `python docs/generate.py`"


def test_drawn_pictures_are_current() -> None:
    for path, drawn in images().items():
        assert path.read_text() == drawn, f"{path}: run `python docs/generate.py`"


def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}"


def test_paths_of_the_repository_exist(page: Path) -> None:
    for code in INLINE_CODE.findall(prose(page)):
        if REPOSITORY_PATH.fullmatch(code):
            assert any(ROOT.glob(code.rstrip("/"))), f"{page}: {code}"


def test_python_blocks_compile(page: Path) -> None:
    for source in blocks(page, "python"):
        if not source.startswith("%%"):
            compile(source, str(page), "exec")


def test_files_that_tutorials_write_are_valid_jobs(tmp_path: Path) -> None:
    written = [
        source.partition("\n")[2]
        for page in tutorials()
        for source in blocks(page, "python")
        if source.startswith("%%writefile") and source.partition("\n")[0].endswith(".yaml")
    ]
    assert len(written) >= 4
    for number, source in enumerate(written):
        path = tmp_path / f"{number}.yaml"
        path.write_text(source)
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


def test_runnable_jobs_are_valid(page: Path, tmp_path: Path) -> None:
    for number, source in enumerate(blocks(page, "yaml", RUNNABLE)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(source)
        load_job(path)


def test_examples_are_valid_jobs() -> None:
    paths = sorted((ROOT / "examples").rglob("*.yaml"))
    assert paths
    for path in paths:
        load_job(path)


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
