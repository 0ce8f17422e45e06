"""Records the messages of a version: python -m tests.golden.record_messages 0.2.0 [TREE]

Has a small run of each main strategy on a cluster of real processes, in which every call of a
client, of the coordinator and of the workers is written down (`message_tap.py`), and keeps them as
`messages/VERSION.json.gz`: calls in the order of their begin, messages as bytes, with when each was
sent or came. TREE: the checkout whose code runs, this one unless given. Made once for each release;
what was recorded once is never recorded anew.
"""

import base64
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "messages"
WORKERS = 2
KEPT = {"Heartbeat": 2, "HeartbeatStream": 1, "Describe": 2}
"""Of each process so many calls of a method are kept; of others all."""
MAX_MESSAGES = {"HeartbeatStream": 4}
STREAMED = {"STRATAGEM_WORKER_OPEN_FILES": "false"}
"""An offered file is gone when the call is made again; chunks are in the record."""
HOOK = """
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("message_tap", {tap!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.tap(pathlib.Path({folder!r}))
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"type": "Local"},
    "allreduce": {"num_replicas": 2, "aggregation": {"method": "AllReduce"}},
    "server": {"num_replicas": 2, "aggregation": {"method": "ParameterServer"}},
    "gossip": {
        "num_replicas": 2,
        "aggregation": {"method": "Decentralized", "topology": "ring"},
    },
    "pipeline": {
        "type": "ModelParallel",
        "partitions": [
            {"node_ids": [f"{n}"], "target": {"WorkerId": f"worker-{n}"}} for n in range(2)
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 2},
    },
    "fedavg": {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 2,
        "client_selection": {"method": "All"},
        "aggregation": {"method": "FedAvg"},
    },
    "population": {
        "type": "PopulationBased",
        "population_size": 2,
        "generations": 2,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Perturbation", "factor": 0.2},
    },
}


def document(name: str) -> dict[str, Any]:
    """The job of a strategy: four steps in two segments, or two rounds, or two generations."""
    strategy = {"type": "DataParallel", **STRATEGIES[name]}
    whole: dict[str, Any] = {
        "name": name,
        "model": {"entrypoint": "tests.userland.recorded:model"},
        "data": {"entrypoint": "tests.userland.recorded:data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "batch_size": 4,
        "seed": 1,
        "strategy": strategy,
    }
    evaluation: dict[str, Any] = {"split": "test", "metrics": ["accuracy"]}
    if strategy["type"] == "PopulationBased":
        space = {"optimizer.lr": {"low": 0.01, "high": 1.0, "scale": "log"}}
        whole |= {"search_space": space, "steps_per_generation": 2}
        return whole | {"evaluation": evaluation | {"best": "accuracy"}}
    if strategy["type"] == "Federated":
        return whole | {"evaluation": evaluation | {"every": "1 rounds"}}
    return whole | {"steps": 4, "evaluation": evaluation | {"every": "2 steps"}}


def have_runs(tree: Path) -> None:
    """What is recorded: the runs, one after the other, and what clients ask and want besides."""
    from stratagem.client.local.cluster import LocalCluster

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            workers=WORKERS, threads=1, import_path=(tree,), environment=STREAMED
        ) as cluster,
        cluster.client() as client,
    ):
        for name in STRATEGIES:
            run = client.submit(document(name), f"recorded-{name}")
            run.result()
            run.status()
        client.runs()
        client.workers()
        run = client.get("recorded-local")
        run.download(Path(folder) / "state.safetensors")
        assert list(run.logs())
        long = client.submit(document("local") | {"steps": 4_000_000}, "recorded-cancelled")
        long.cancel()
        long.resume()
        long.cancel()
        long.delete()


def record(version: str, tree: Path) -> None:
    """Have the runs on the code of a tree, and keep their messages."""
    with tempfile.TemporaryDirectory() as hook, tempfile.TemporaryDirectory() as folder:
        tap = str(Path(__file__).with_name("message_tap.py"))
        hooked = HOOK.format(tap=tap, folder=folder)
        (Path(hook) / "sitecustomize.py").write_text(hooked)
        parts = ("client", "common", "coordinator", "worker", "tools", ".")
        path = [hook, *(str(tree / part) for part in parts)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, __file__, "--have-runs", str(tree)]
        subprocess.run(command, env=environment, check=True, cwd=tree)
        calls = list(_kept(_calls(Path(folder))))
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"version": version, "calls": calls}, separators=(",", ":"))
    (FOLDER / f"{version}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(calls)} calls, {len(text)} bytes as text")
    print(Counter(f"{call['by']} {call['method'].rpartition('/')[2]}" for call in calls))


def _calls(folder: Path) -> list[dict[str, Any]]:
    """The calls of all processes, in the order of their begin: who made it, to whom, and its
    messages as (direction, seconds since the first call, content)."""
    notes: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            notes[note["call"]].append(note)
    calls = sorted(notes.values(), key=lambda each: each[0]["begun_s"])
    first_s, names = float(calls[0][0]["begun_s"]), dict(_addresses(calls))

    def since(text: str) -> float:
        return round(float(text) - first_s, 6)

    return [
        {
            "by": _name_of(call[0]["by"]),
            "to": names.get(call[0]["to"], "coordinator"),
            "method": call[0]["method"],
            "begun_s": since(call[0]["begun_s"]),
            "messages": [
                (each["direction"], since(each["at_s"]), each["content"]) for each in call
            ],
        }
        for call in calls
    ]


def _addresses(calls: list[list[dict[str, str]]]) -> Iterator[tuple[str, str]]:
    """Where workers were called, and their names, as they have registered."""
    from stratagem.v1 import coordinator_pb2

    for call in calls:
        if call[0]["method"].endswith("/RegisterWorker"):
            content = base64.b64decode(call[0]["content"])
            request = coordinator_pb2.RegisterWorkerRequest.FromString(content)
            yield request.address, request.worker_id


def _name_of(command: str) -> str:
    words = command.split()
    if "--name" in words:
        return words[words.index("--name") + 1]
    return "client" if "--have-runs" in words else "coordinator"


def _kept(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls:
        name = call["method"].rpartition("/")[2]
        counts[call["by"], name] += 1
        if counts[call["by"], name] <= KEPT.get(name, len(calls)):
            yield call | {"messages": call["messages"][: MAX_MESSAGES.get(name)]}


if __name__ == "__main__":
    if sys.argv[1] == "--have-runs":
        have_runs(Path(sys.argv[2]))
    else:
        record(sys.argv[1], Path(sys.argv[2] if sys.argv[2:] else ".").resolve())
