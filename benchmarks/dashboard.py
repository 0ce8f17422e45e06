"""What the page costs: its answers about long runs, its memory, and what it asks the coordinator.

    python benchmarks/dashboard.py
    python benchmarks/dashboard.py --facts 20000 --workers 100 --tabs 3

A coordinator process has two runs of so many facts in its journal: one of segments, one of rounds
(of journals that clusters have written, repeated). Simulated workers of
benchmarks/simulated_hosts.py are registered. A page process is asked for every route: first, and
again. Then a run on a simulated worker commits twice a second, and so many tabs look at it as a
browser does: an event stream each, and after what has changed the run and its pictures. The
coordinator's CPU with them and without them is in shares of one core.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.load import JOB  # noqa: E402
from benchmarks.long_journal import fill  # noqa: E402
from stratagem.client.local.cluster import LocalCluster  # noqa: E402
from tests.client.dashboard.page_rig import Answer, Browser  # noqa: E402
from tests.free_ports import free_port  # noqa: E402

MEASURED_S = 3.0
REFRESH_S = 0.3
"""After what has changed a tab asks again, as static/run.js does."""
WIDTH = 760


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


@contextmanager
def page(coordinator: str) -> Iterator[tuple[Browser, int]]:
    """A page process: its browser, and its pid."""
    port = free_port()
    arguments = ["dashboard", "--coordinator", coordinator, "--listen", f"127.0.0.1:{port}"]
    with child("-m", "stratagem.program", *arguments) as process:
        assert process.stdout is not None
        token = process.stdout.readline().partition("#token=")[2].strip()
        browser = Browser(port)
        answer = browser.ask("POST", "/api/session", token)  # it listens before it says where
        browser.cookie = answer.headers["set-cookie"].partition(";")[0]
        yield browser, process.pid


def routes(browser: Browser, pid: int, num_workers: int) -> None:
    print("| route | first s | whole s | again s | KB |\n|---|---|---|---|---|")
    paths = ["/api/runs", "/api/workers"]
    for run in ("segments", "rounds"):
        query = f"run={run}"
        paths += [f"/api/runs/{run}", f"/api/panels?{query}&width={WIDTH}"]
        paths += [f"/api/panels?{query}&width=356", f"/api/events?{query}&newest&limit=100"]
        paths += [f"/api/logs?{query}"]
    for path in paths:
        began_s = time.perf_counter()
        answer = asked(browser, path)
        first_s = time.perf_counter() - began_s
        if path == "/api/workers":
            assert len(answer.value) == num_workers
        while "panels?" in path and answer.value["num_read"] < answer.value["num_events"]:
            answer = asked(browser, path)
        whole_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        answer = asked(browser, path)
        took_s = (first_s, whole_s, time.perf_counter() - began_s)
        times = " | ".join(f"{each:.3f}" for each in took_s)
        print(f"| {path} | {times} | {len(answer.body) / 1000:.0f} |", flush=True)
    print(f"\nmemory of the page's process: {memory_mb(pid):.0f} MB")


def asked(browser: Browser, path: str) -> Answer:
    answer = browser.get(path)
    assert answer.status == 200, answer.body
    return answer


def tab(
    browser: Browser, run: str, is_over: threading.Event, following: threading.Semaphore
) -> None:
    """Look at a run until it is over: as static/run.js, without drawing. following: is released
    once the tab has seen a fact of the run."""
    is_new = True
    browser.get(f"/api/runs/{run}")
    newest = browser.get(f"/api/events?run={run}&newest&limit=100").value
    browser.get(f"/api/panels?run={run}&width={WIDTH}")
    asked_s = time.monotonic()
    for kind, _, _ in browser.events(f"/api/stream?run={run}&from={newest[0]['index'] + 1}"):
        if is_over.is_set():
            return
        if kind == "fact" and is_new:
            following.release()
            is_new = False
        if kind == "fact" and time.monotonic() - asked_s > REFRESH_S:
            browser.get(f"/api/runs/{run}")
            browser.get(f"/api/panels?run={run}&width={WIDTH}")
            asked_s = time.monotonic()


def live(coordinator: int, browser: Browser, runs: Sequence[str], seconds: float) -> float:
    """The coordinator's share of a core while a tab looks at each of these runs."""
    is_over, following = threading.Event(), threading.Semaphore(0)
    tabs = [
        threading.Thread(target=tab, args=(browser, run, is_over, following), daemon=True)
        for run in runs
    ]
    for each in tabs:
        each.start()
    for _ in tabs:
        following.acquire()
    share = cpu_share(coordinator, seconds)
    is_over.set()
    for each in tabs:
        each.join()
    return share


def compare(client: Any, coordinator: int, browser: Browser, num_tabs: int, seconds: float) -> None:
    """Print what pages cost the coordinator: all on one run, and each on a run of its own."""
    for runs in (["live-0"], [f"live-{number}" for number in range(num_tabs)]):
        for handle in [client.submit(JOB, run) for run in runs]:
            next(iter(handle.watch(kinds=["SegmentCommitted"])))
        alone = cpu_share(coordinator, seconds)
        shown = (runs * num_tabs)[:num_tabs]
        watched = live(coordinator, browser, shown, seconds)
        what = "a run that commits" if len(runs) == 1 else f"{len(runs)} runs that commit"
        print(
            f"coordinator's CPU, {what} twice a second: {alone:.1%} of a core; with "
            f"{num_tabs} pages {watched:.1%}, which is {watched - alone:.1%} more",
            flush=True,
        )


def streams(browser: Browser, pid: int, count: int) -> None:
    """Print what open streams cost the page's process, of one run and of all."""
    before_mb = memory_mb(pid)
    with ExitStack() as stack:
        for number in range(count):
            path = "/api/stream?run=live-0" if number % 2 else "/api/stream"
            response = stack.enter_context(browser.open("GET", path))
            assert response.status == 200
            assert response.readline().startswith(b"event: beat")
        share, after_mb = cpu_share(pid, MEASURED_S), memory_mb(pid)
    print(
        f"{count} open streams, which nobody reads on: memory {before_mb:.0f} to {after_mb:.0f} MB"
        f", the page's CPU {share:.1%} of a core"
    )


def cpu_share(pid: int, seconds: float) -> float:
    cpu_s, began_s = cpu(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu(pid) - cpu_s) / (time.monotonic() - began_s)


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=100_000, help="of each run")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--streams", type=int, default=200, help="that are open at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each share of CPU")
    chosen = parser.parse_args()
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
        browser, pid = stack.enter_context(page(cluster.address))
        routes(browser, pid, chosen.workers)
        coordinator = cluster.processes["coordinator"].pid
        assert coordinator is not None
        compare(client, coordinator, browser, chosen.tabs, chosen.seconds)
        streams(browser, pid, chosen.streams)


if __name__ == "__main__":
    main()
