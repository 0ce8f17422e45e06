"""A real coordinator and a real worker under attack, while runs go on that must not notice."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from safetensors.torch import load_file

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import LoopThread
from stratagem.common.job import JobSpec
from stratagem.v1 import worker_pb2 as wpb
from tests.cluster.jobs import Outcome, outcome_of
from tests.crash.rig import until
from tests.hostile.attack import Answer, lawless_channel, say
from tests.hostile.promises import Method, method
from tests.hostile.samples import Target, execute
from tests.jobs import ALLOW, job
from tests.patience import PATIENCE_S
from tests.repository import ROOT

IDLE_TIMEOUT_S: Final = 1.0
KEPT: Final = "kept"
WORKER_RUN: Final = "victim"


def calm_job() -> JobSpec:
    """Short, with commits and an evaluation."""
    return job(steps=6, evaluation={"split": "test", "metrics": ["accuracy"]})


@dataclass
class Rig:
    """What is attacked, and the hands that attack."""

    cluster: LocalCluster
    loop: LoopThread
    target: Target
    digests: list[str]
    """Of the commits of a calm run that nobody disturbs."""
    calm: JobSpec = field(default_factory=calm_job)
    channels: dict[str, Any] = field(default_factory=dict)
    num_calm_runs: int = 0

    @property
    def calm_run(self) -> str:
        """The calm run that goes on now, or that comes next."""
        return f"calm-{self.num_calm_runs}"

    def address_of(self, each: Method) -> str:
        name = "coordinator" if each.service == "CoordinatorService" else "worker-0"
        return self.cluster.processes[name].address

    def say(self, each: Method, frames: list[bytes], **options: Any) -> Answer:
        """See attack.say."""
        return self.loop.call(self.saying(each, frames, **options))

    async def saying(self, each: Method, frames: list[bytes], **options: Any) -> Answer:
        """The same, on the loop."""
        address = self.address_of(each)
        if address not in self.channels:
            self.channels[address] = lawless_channel(address)
        return await say(self.channels[address], each, frames, **options)

    def rss(self) -> Mapping[str, int]:
        """Resident bytes of both processes."""
        return {
            name: psutil.Process(view.pid).memory_info().rss
            for name, view in self.cluster.processes.items()
        }

    def files(self) -> set[str]:
        """All that lies in the data folders, but for logs and what is held for backups."""
        held = self._held()
        folders = [self.cluster.folder / name for name in self.cluster.processes]
        return {
            str(path.relative_to(self.cluster.folder))
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file()
            and path.parent.name != "logs"
            and "journal" not in path.name
            and path.stem not in held
        }

    def _held(self) -> set[str]:
        """The digests of blobs that are kept for a day, since an attack has asked for a backup."""
        folder = self.cluster.folder / "coordinator" / "blobs"
        held: set[str] = set()
        for _, kind, payload in self._events():
            if kind == "BlobsHeld":
                listed = json.loads(payload)["listed"]
                content = load_file(folder / listed[:2] / f"{listed}.safetensors")["digests"]
                held |= {listed, *(bytes(row).hex() for row in content.numpy())}
        return held

    def facts(self) -> Counter[tuple[str, str]]:
        """How often which kind of fact stands in the journal, by run, but for runs that go on and
        the holds of backups, of which each leaves one."""
        told = [(run_id, kind) for run_id, kind, _ in self._events() if kind != "BlobsHeld"]
        return Counter(each for each in told if not each[0].startswith("calm-"))

    def _events(self) -> list[tuple[str, str, str]]:
        path = self.cluster.folder / "coordinator" / "journal.sqlite"
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return connection.execute("SELECT run_id, kind, payload FROM event").fetchall()
        finally:
            connection.close()

    def num_starts(self) -> dict[str, int]:
        """How often each process was started: once, unless an attack has ended it."""
        return {name: view.num_starts for name, view in self.cluster.processes.items()}


@contextmanager
def under_attack(
    folder: Path, calm: JobSpec | None = None, workers: int = 1, **environment: str
) -> Iterator[Rig]:
    """A cluster with a run that has ended and a session that nobody else uses.

    calm: what the runs train that must not notice.
    """
    calm = calm or calm_job()
    limits = {
        "STRATAGEM_COORDINATOR_STREAM_IDLE_TIMEOUT_S": str(IDLE_TIMEOUT_S),
        "STRATAGEM_WORKER_STREAM_IDLE_TIMEOUT_S": str(IDLE_TIMEOUT_S),
        "STRATAGEM_WORKER_EXCHANGE_TIMEOUT_S": "0.2",
        **environment,
    }
    with LocalCluster(
        workers=workers,
        threads=1,
        data_dir=folder,
        import_path=[ROOT],
        allow=[ALLOW],
        environment=limits,
    ) as cluster:
        with cluster.client() as client:
            outcome = outcome_of(client.submit(calm, KEPT))
        target = Target(KEPT, WORKER_RUN, calm_job())
        loop = LoopThread()
        rig = Rig(cluster, loop, target, outcome.digests, calm)
        try:
            built = execute(target, build=wpb.BuildPlan())
            said = [built.SerializeToString()]
            answer = rig.say(method("Execute"), said, limit_s=30.0, patience_s=PATIENCE_S)
            assert answer.code is grpc.StatusCode.OK, answer
            yield rig
        finally:
            for channel in rig.channels.values():
                loop.call(channel.close())
            loop.close()


@contextmanager
def calm_runs(rig: Rig, *, pause_s: float = 0.0, may_form_anew: bool = False) -> Iterator[None]:
    """One run after the other; each must end with the same commits.

    pause_s: between two runs, where it is enough that some go on.
    may_form_anew: its members may have to meet again, after an attack on the run itself.
    """
    is_over = threading.Event()
    failures: list[BaseException] = []

    def keep_running() -> None:
        try:
            with rig.cluster.client() as client:
                while not is_over.is_set():
                    run = client.submit(rig.calm, rig.calm_run)
                    _check(rig, outcome_of(run), may_form_anew)
                    run.delete()
                    rig.num_calm_runs += 1
                    is_over.wait(pause_s)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=keep_running, name="calm runs")
    before = rig.num_calm_runs
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
    if failures:
        raise failures[0]
    assert rig.num_calm_runs > before


def _check(rig: Rig, outcome: Outcome, may_form_anew: bool) -> None:
    assert outcome.digests == rig.digests
    kinds = {event.kind for event in outcome.events}
    assert not kinds & {"PartyFailed", "ProcessDied"}, kinds
    if not may_form_anew:
        assert len(outcome.of("MembersFormed")) == 1, "the run was disturbed"


@contextmanager
def nothing_left_behind(rig: Rig, max_growth_bytes: int = 64 * 2**20) -> Iterator[None]:
    """Facts and processes are as before, no file came, memory is back within a limit, and the run
    that had ended can still be downloaded.

    Files may go meanwhile: states of runs that were deleted before are collected beside.
    """
    facts, files, starts, rss = rig.facts(), rig.files(), rig.num_starts(), rig.rss()
    yield
    assert rig.num_starts() == starts
    assert rig.facts() == facts

    def left() -> list[str]:
        grown = {name: after - rss[name] for name, after in rig.rss().items()}
        too_large = [f"{name} by {n} bytes" for name, n in grown.items() if n > max_growth_bytes]
        return [*too_large, *sorted(rig.files() - files)]

    # What was broken off is cleaned up, and memory given back, beside the answers.
    with suppress(AssertionError):
        until(lambda: not left(), "nothing is left")
    assert not (remains := left()), remains
    with rig.cluster.client() as client:
        assert client.get(KEPT).state_dict()
