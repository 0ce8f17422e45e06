"""Photographs every page of the dashboard: `make screenshots`, or
`python -m docs.screenshots [folder]`.

It trains examples of every strategy on a real cluster of this machine, kills a worker on the way,
and opens the page of that cluster in Chromium, in a wide window and on a phone's width. Pictures
come to docs/images/dashboard, in few colours, so that they stay small. No test asks whether they
are current: times differ. It takes some minutes.
"""

import io
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from docs.pictures import killed, trained
from stratagem.client import Client, LocalCluster, RunHandle
from stratagem.client.dashboard.server import PageOptions, PageServer
from stratagem.common.job import load_job

ROOT: Final = Path(__file__).resolve().parent.parent
IMAGES: Final = ROOT / "docs" / "images" / "dashboard"
CUSTOM: Final = ROOT / "examples" / "custom_strategy"
BROWSERS: Final = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_MS: Final = 180_000
SIZES: Final = {1280: 800, 390: 800}
"""The height of a window by its width; a page that is longer is photographed to LONGEST of it."""
LONGEST: Final = {1280: 2200, 390: 1900}
COLOURS: Final = 48
STILL_MS: Final = 1500
"""A page that has not changed for so long is drawn."""

WRONG: Final = """def load():
    with open("digits.csv") as file:
        return file.read()
"""
"""The data of a run that fails."""

FEDERATED: Final = (
    "strategy.num_clients=12",
    "strategy.rounds=20",
    "strategy.client_selection={method: Random, fraction: 0.6}",
)


def main(folder: Path) -> None:
    """Train, photograph, and write the pictures to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as name,
        cluster_in(Path(name)) as cluster,
        cluster.client() as client,
        page_of(cluster) as url,
        opened() as browser,
    ):
        places = {name: f"runs/{run_id}" for name, run_id in runs(cluster, client).items()}
        places |= {"runs": "", "workers": "workers", "compare": "compare/slower,digits"}
        live = endless(client)
        for name, place in places.items():
            photograph(browser, url, place, folder / name)
        for name in ("runs", "allreduce"):
            photograph(browser, url, places[name], folder / f"{name}-dark", dark=True)
        away(cluster, browser, url, f"runs/{live.run_id}", folder / "away")
        live.cancel()
    total = sum(path.stat().st_size for path in folder.glob("*.png"))
    print(f"{total / 1e6:.2f} MB in all")


@contextmanager
def cluster_in(folder: Path) -> Iterator[LocalCluster]:
    """Four workers, and a coordinator that has the strategy of examples/custom_strategy."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    site = str(folder / "site")
    subprocess.run([*install, site, "--no-build-isolation", str(CUSTOM)], check=True)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "task.py").write_text(WRONG)
    with LocalCluster(
        workers=4,
        import_path=[folder],
        threads=1,
        environment={"PYTHONPATH": site},
        worker_arguments={f"worker-{number}": ["--tags", "stage"] for number in range(4)},
    ) as cluster:
        yield cluster


@contextmanager
def page_of(cluster: LocalCluster) -> Iterator[str]:
    """The address of the page of a cluster, with its token."""
    server = PageServer(PageOptions("127.0.0.1:0"), cluster.address)
    with server.beside():
        yield server.url


def runs(cluster: LocalCluster, client: Client) -> Mapping[str, str]:
    """Train to the end; return the ids of runs by the names of their pictures."""
    killed(cluster, client, "digits")
    trained(client, "digits", "epochs=40", "optimizer.lr=0.005", run_id="slower")
    examples: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "decentralized": ("gossip", "digits_gossip", ()),
        "pipeline": ("two-stages", "digits_pipeline", ()),
        "federated": ("hospitals", "digits_fedavg", FEDERATED),
        "population": ("search", "digits_population", ()),
        "nested": ("silos", "charlm_silos", ()),
        "custom": ("halving", "custom_strategy/job", ()),
    }
    for run_id, example, changes in examples.values():
        trained(client, example, *changes, run_id=run_id)
    failed(client)
    named = {name: run_id for name, (run_id, _, _) in examples.items()}
    return {"allreduce": "digits", **named, "failed": "no-data"}


def failed(client: Client) -> None:
    """Wait for the end of a run whose data cannot be had."""
    changes = ["name=no-data", "data.entrypoint=task:load"]
    run = client.submit(load_job(ROOT / "examples" / "digits.yaml", changes), "no-data")
    for _ in run.watch():
        pass


def endless(client: Client) -> RunHandle:
    """Return a run that still goes on when the pictures are taken."""
    changes = ["name=long", "epochs=20000", "optimizer.lr=0.001"]
    return client.submit(load_job(ROOT / "examples" / "digits.yaml", changes), "long")


@contextmanager
def opened() -> Iterator[Any]:
    """A browser of this machine."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit(f"no browser is here: none of {', '.join(BROWSERS)}")
    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


def photograph(browser: Any, url: str, place: str, path: Path, *, dark: bool = False) -> None:
    """Write one picture for each width, as PATH-WIDTH.png."""
    for width in SIZES:
        with tab(browser, url, width, dark=dark) as page:
            page.goto(f"{url.partition('#')[0]}#/{place}")
            wait_until_drawn(page)
            save(page, width, path)


def away(cluster: LocalCluster, browser: Any, url: str, place: str, path: Path) -> None:
    """Photograph the page of a run while the coordinator does not answer."""
    for width in SIZES:
        with tab(browser, url, width) as page:
            page.goto(f"{url.partition('#')[0]}#/{place}")
            wait_until_drawn(page)
            cluster.kill("coordinator", signal.SIGSTOP)
            try:
                page.locator("#banner[data-state=away]").wait_for(timeout=PATIENCE_MS)
                page.wait_for_timeout(STILL_MS)
                save(page, width, path)
            finally:
                cluster.kill("coordinator", signal.SIGCONT)


@contextmanager
def tab(browser: Any, url: str, width: int, *, dark: bool = False) -> Iterator[Any]:
    """A page that the coordinator answers."""
    size = {"width": width, "height": SIZES[width]}
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(url)
    page.locator("#banner[data-state=live]").wait_for()
    yield page
    context.close()


def wait_until_drawn(page: Any) -> None:
    """Return when the page's pictures have stayed what they are; numbers of a live run go on."""
    drawn = "document.querySelectorAll('main svg, main tbody tr').length"
    before, after = -1, 0
    while before != after or page.locator("main .page > p.quiet:only-child").count():
        page.wait_for_timeout(STILL_MS)
        before, after = after, page.evaluate(drawn)


def save(page: Any, width: int, path: Path) -> None:
    """Write what the page shows, in few colours."""
    from PIL import Image

    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": width, "height": min(height, LONGEST[width])})
    page.wait_for_timeout(STILL_MS)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    file = path.with_name(f"{path.name}-{width}.png")
    in_few_colours(picture).save(file, optimize=True)
    print(file.name, picture.size, file.stat().st_size, flush=True)


def in_few_colours(picture: Any) -> Any:
    """Return a picture whose most frequent colours are as they were, the others near them."""
    from PIL import Image

    found, of = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True)
    most = np.argsort(np.bincount(of.ravel()))[::-1][:COLOURS]
    rest = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).getpalette()
    few = np.concatenate([found[most], np.reshape(rest, (-1, 3))[:COLOURS]]).astype(np.int32)
    nearest = np.argmin(((found[:, None].astype(np.int32) - few) ** 2).sum(axis=2), axis=1)
    shape = (picture.height, picture.width)
    indexed = Image.fromarray(nearest.astype(np.uint8)[of].reshape(shape), mode="P")
    indexed.putpalette(few.astype(np.uint8).tobytes())
    return indexed


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
