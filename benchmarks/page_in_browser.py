"""What the page costs a browser: time to the first picture, long tasks, memory.

    python benchmarks/page_in_browser.py
    python benchmarks/page_in_browser.py --facts 20000 --workers 100

The runs, workers and processes of benchmarks/dashboard.py, looked at with Chromium: the list, both
long runs, the workers, and a run that commits twice a second. A task is what keeps the page from
answering its user; on a busy machine its CPU says more than the time that it took. Sizes are those
of JavaScript's heap after its garbage is collected.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from benchmarks.dashboard import child, page  # noqa: E402
from benchmarks.load import JOB  # noqa: E402
from benchmarks.long_journal import fill  # noqa: E402
from stratagem.client.local.cluster import LocalCluster  # noqa: E402

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_MS = 120_000
TASKS = ("RunTask", "ThreadControllerImpl::RunTask")
TRACED = ["toplevel", "disabled-by-default-devtools.timeline"]


def main() -> None:
    """Print a line for each place of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=100_000, help="of each run")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0, help="that a live run is watched")
    chosen = parser.parse_args()
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        sys.exit(f"no browser is here: none of {', '.join(NAMES)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fill(folder / "coordinator" / "journal.sqlite", chosen.facts)
        cluster = stack.enter_context(LocalCluster(workers=0, data_dir=folder))
        client: Any = stack.enter_context(cluster.client())
        script = str(ROOT / "benchmarks" / "simulated_hosts.py")
        workers = stack.enter_context(
            child(script, cluster.address, "--workers", str(chosen.workers))
        )
        assert workers.stdout is not None
        workers.stdout.readline()
        server, _ = stack.enter_context(page(cluster.address))
        started = stack.enter_context(sync_playwright())
        browser = started.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        name, _, value = server.cookie.partition("=")
        url = f"http://127.0.0.1:{server.port}"
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(PATIENCE_MS)
        context.add_cookies([{"name": name, "value": value, "url": url}])
        client.submit(JOB, "live")
        print("| place | first picture s | longest task ms | its CPU ms | heap MB | elements |")
        print("|---|---|---|---|---|---|")
        for place, shown in (
            ("", "tbody tr"),
            ("runs/segments", "figure svg"),
            ("runs/segments", "figure svg"),
            ("runs/rounds", "figure svg"),
            ("workers", "tbody tr"),
            ("runs/live", "figure svg"),
        ):
            print(line(context, url, place, shown, chosen.seconds), flush=True)
        browser.close()


def line(context: Any, url: str, place: str, shown: str, seconds: float) -> str:
    """Open a place in a tab of its own, and look at it for a while."""
    tab = context.new_page()
    devtools = context.new_cdp_session(tab)
    context.browser.start_tracing(page=tab, categories=TRACED)
    began_s = time.perf_counter()
    tab.goto(f"{url}/#/{place}")
    tab.locator(shown).first.wait_for()
    took_s = time.perf_counter() - began_s
    tab.wait_for_timeout(1000 * seconds)
    wall_ms, cpu_ms = longest(json.loads(context.browser.stop_tracing())["traceEvents"])
    devtools.send("HeapProfiler.collectGarbage")
    heap = devtools.send("Runtime.getHeapUsage")["usedSize"] / 2**20
    elements = tab.evaluate("document.querySelectorAll('*').length")
    tab.close()
    tasks = f"{wall_ms:.0f} | {cpu_ms:.0f}"
    return f"| {place or 'runs'} | {took_s:.2f} | {tasks} | {heap:.1f} | {elements} |"


def longest(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The longest task of the page's own thread in milliseconds, and the most CPU of one."""
    names = (each for each in events if each["name"] == "thread_name")
    mains = {
        (each["pid"], each["tid"]) for each in names if each["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        (each["dur"] / 1000, each.get("tdur", 0) / 1000)
        for each in events
        if each["name"] in TASKS and "dur" in each and (each["pid"], each["tid"]) in mains
    ]
    return max(wall for wall, _ in tasks), max(cpu for _, cpu in tasks)


if __name__ == "__main__":
    main()
