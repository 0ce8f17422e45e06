"""The wall time of a federated round whose sites are behind tunnels, beside sites that are dialled.

    sudo python benchmarks/tunnel_rounds.py --rate 100mbit           # tbf between two namespaces
    sudo python benchmarks/tunnel_rounds.py --rate 200mbit --tls
    python benchmarks/tunnel_rounds.py                               # loopback

One coordinator, two sites of each kind, everything durable: jobs of a few rounds go to the sites of
one kind after the other. The model is that of `federated_round.py`, which is nearly all transport.
A ratio is that of two jobs next to each other; the first round of a job is not counted.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.federated_round import job  # noqa: E402
from benchmarks.tunnel import NAMES, PLACES, namespaces, run  # noqa: E402
from stratagem.client import Client, Event, LocalCluster  # noqa: E402
from stratagem.common.identity.certificates import Authority, init  # noqa: E402

WAYS: Final = ("direct", "tunnel")
SITES: Final = {f"worker-{number}": WAYS[number // 2] for number in range(4)}
"""By name how a site is reached."""


@contextmanager
def cluster_of(given: argparse.Namespace, folder: Path) -> Iterator[Client]:
    """A coordinator here, and sites of each kind at the other end of the link."""
    within = [shutil.which("ip") or "ip", "netns", "exec", NAMES[1]] if given.rate else []
    here, there = PLACES if given.rate else ("127.0.0.1", "127.0.0.1")
    environment = {} if given.tls else {"STRATAGEM_COORDINATOR_ALLOW_INSECURE_NETWORK": "true"}
    arguments = {
        name: ["--tags", way, *(["--tunnel"] if way == "tunnel" else ["--listen", f"{there}:0"])]
        for name, way in SITES.items()
    }
    files = None
    if given.tls:
        certificates = folder / "certificates"
        init(certificates, workers=[*SITES], clients=["me"], hosts=[here])
        signed = Authority(certificates)
        files = signed.files("client-me")
        for name in SITES:
            arguments[name] += _flags(signed.files(f"worker-{name}"))
        environment = {
            f"STRATAGEM_COORDINATOR_TLS_{key.upper()}": str(getattr(own, key))
            for own in (signed.files("coordinator"),)
            for key in ("ca", "cert", "key")
        }
    else:
        environment["STRATAGEM_WORKER_ALLOW_INSECURE_NETWORK"] = "true"
    cluster = LocalCluster(
        workers=len(SITES),
        threads=1,
        listen=f"{here}:0",
        data_dir=folder / "data",
        allow=("benchmarks.federated_round:*",),
        import_path=(ROOT,),
        environment=environment,
        worker_arguments=arguments,
        programs={
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [*within, sys.executable, "-m", "stratagem.worker"],
        },
    )
    with cluster, Client(cluster.address, tls=files) as client:
        yield client


def _flags(files: Any) -> list[str]:
    return ["--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]


def rounds_s(client: Client, way: str, given: argparse.Namespace) -> list[float]:
    """Seconds of each round of a job at the sites of one kind, but for the first."""
    spec: Any = job(given.mb * 1_000_000 // 4, len(SITES), given.rounds)
    spec["strategy"]["client_selection"] = {"method": "ByCapability", "required_tags": [way]}
    ended = [
        event.time_s
        for event in client.submit(spec).watch()
        if isinstance(event, Event) and event.kind == "SegmentCommitted"
    ]
    return [after - before for before, after in pairwise(ended)][1:]


def measure(given: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder, cluster_of(given, Path(folder)) as client:
        for turn in range(given.jobs):
            order = WAYS if turn % 2 == 0 else WAYS[::-1]
            of_job = {way: rounds_s(client, way, given) for way in order}
            for way, each in of_job.items():
                seconds[way] += each
            ratios.append(median(of_job["tunnel"]) / median(of_job["direct"]))
            said = (f"{way} {median(each):.3f} ({min(each):.3f}) s" for way, each in of_job.items())
            print(", ".join(said), flush=True)
    direct, tunnel = (median(seconds[way]) for way in WAYS)
    least = [min(seconds[way]) for way in WAYS]
    where = f"{given.rate or 'loopback'}{', TLS' if given.tls else ''}"
    print(
        f"{given.mb} MB, {where}: a round direct {direct:.3f} s, tunnel {tunnel:.3f} s; "
        f"ratio of medians {tunnel / direct:.3f}, of jobs in turn {median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); least {least[0]:.3f} s, {least[1]:.3f} s, "
        f"ratio {least[1] / least[0]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=10, help="size of the model")
    parser.add_argument("--rounds", type=int, default=6, help="of each job")
    parser.add_argument("--jobs", type=int, default=5, help="of each kind")
    parser.add_argument("--rate", default="", help="of the link, such as 100mbit")
    parser.add_argument("--tls", action="store_true", help="each proves who it is, both ways")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rate and not given.inside:
        with namespaces(given.rate):
            inside = [sys.executable, __file__, *sys.argv[1:], "--inside"]
            run("ip", "netns", "exec", NAMES[0], *inside)
    else:
        print("load", *(f"{load:.1f}" for load in os.getloadavg()), flush=True)
        measure(given)


if __name__ == "__main__":
    main()
