"""Training over slow links: time to the loss of synchronous training, for each way to send less.

    python benchmarks/slow_links.py losses --out losses.json          # no link: it changes no bit
    sudo python benchmarks/slow_links.py seconds --mbit 20 50 100 --out seconds.json
    sudo python benchmarks/slow_links.py whole --mbit 20 --whole-steps 1000 --out whole.json
    python benchmarks/slow_links.py report losses.json seconds.json --target 1.946
    python benchmarks/slow_links.py plot losses.json seconds.json --out docs/images/diloco.svg

`losses` trains a character transformer with all replicas in one process, and stops a variant where
the test loss is that of the last step of "every step". `seconds` times some steps of each variant
in four processes, each in a network namespace of its own on a switch, behind a token bucket of so
many Mbit/s in each direction (tc tbf). A variant with local steps takes few of them between its
exchanges there, and what an exchange takes is divided by those it has. `whole` takes all steps of
one variant, with its own number of local steps. A step takes the processor's time of the slowest
member, and what the member that came last has waited for others: each replica has a machine of its
own where links are slow, so other work of this one is not to count. Needs root for namespaces.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from stratagem.client.pictures.curves import Line, curve
from stratagem.common.job import JobSpec
from stratagem.common.strategy import local_steps_of
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine import LocalStepsTrainer, build_local_steps_trainer, build_trainer
from stratagem.worker.exchange import GradientReducer, mesh_exchange, solo_exchange
from stratagem.worker.exchange.sliced_reducer import FragmentExchange, FragmentLink
from stratagem.worker.mesh import Link, form_gloo
from stratagem.worker.user_code.entrypoints import EntryPoints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the job's entry points are in examples/

from benchmarks.slow_members import hear, introduce, members, rendezvous, tell  # noqa: E402

ALLOWED, CPU = EntryPoints(["examples.charlm:*"]), torch.device("cpu")
NUM_REPLICAS, NETWORK, CABLE, BATCH_SIZE = 4, "10.99.78", "slow", 16
NUM_TIMED, TIMED_LOCAL_STEPS = 20, 10
NESTEROV = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
VARIANTS: dict[str, dict[str, Any]] = {
    "every step": {},
    "every step, int8": {"compression": "int8"},
    "every step, top_k 1 %": {"compression": {"codec": "top_k", "k_fraction": 0.01}},
    "DiLoCo 20": {"options": {"local_steps": 20, "outer": NESTEROV}},
    "DiLoCo 50": {"options": {"local_steps": 50, "outer": NESTEROV}},
    "DiLoCo 50, 8 bits": {"options": {"local_steps": 50, "outer": NESTEROV, "outer_bits": 8}},
    "Streaming DiLoCo 50": {
        "options": {
            "local_steps": 50,
            "outer": NESTEROV,
            "fragments": 5,
            "overlap_steps": 5,
            "outer_bits": 8,
        }
    },
}
"""By name what the job has besides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("losses", "seconds", "whole", "report", "plot", "member"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("slow_links.json"))
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 50.0, 100.0])
    parser.add_argument("--steps", type=int, default=500, help="of the variant with every step")
    parser.add_argument("--most", type=int, default=2000, help="steps of any other variant")
    parser.add_argument("--target", type=float, help="test loss to stop at, or to report")
    parser.add_argument("--whole-steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    options = parser.parse_args()
    match options.what:
        case "losses":
            measure_losses(options)
        case "seconds" | "whole" if os.geteuid() != 0:
            print("network namespaces need root: sudo python benchmarks/slow_links.py seconds")
        case "seconds" | "whole":
            measure_seconds(options)
        case "plot":
            options.out.write_text(
                plotted(*(json.loads(each.read_text()) for each in options.files))
            )
        case "report":
            losses, seconds = (json.loads(path.read_text()) for path in options.files)
            report(losses, seconds, options.target)
        case _:
            serve(int(options.files[0].name))


def job_of(order: dict[str, Any], *, is_timed: bool = False) -> JobSpec:
    """The job of a variant; is_timed: with fewer local steps from exchange to exchange."""
    sections = dict(VARIANTS[order["variant"]])
    options = dict(sections.pop("options", {}))
    if is_timed and options:
        options["local_steps"] = TIMED_LOCAL_STEPS * options.get("fragments", 1)
    kwargs = {"width": order["width"], "num_blocks": order["blocks"]}
    return JobSpec.parse(
        {
            "name": "slow-links",
            "model": {"entrypoint": "examples.charlm:build_model", "kwargs": kwargs},
            "data": {"entrypoint": "examples.charlm:load"},
            "loss": "token_cross_entropy",
            "optimizer": {"name": "adamw", "lr": 0.001, "clip_norm": 1.0},
            "steps": 100_000,
            "batch_size": BATCH_SIZE,
            "strategy": {
                "type": "DataParallel",
                "num_replicas": NUM_REPLICAS,
                "aggregation": {"method": "AllReduce"},
                "options": options,
            },
            **sections,
        }
    )


def trainer_of(job: JobSpec, owned: range) -> Any:
    """The trainer of these replicas, with the model of the seed."""
    if local_steps_of(job.strategy) is None:
        return build_trainer(job, ALLOWED, device=CPU, fresh=True)
    made = build_local_steps_trainer(job, ALLOWED, owned, device=CPU)
    made.load_state(*build_trainer(job, ALLOWED, device=CPU, fresh=True).copy_state())
    return made


def exchange_of(trainer: Any, link: Link | None) -> Any:
    """The exchange of a trainer over a link, or of all replicas on one member."""

    def reduced(summed: Any, share: Link | None) -> GradientReducer:
        if share is None:
            return solo_exchange(summed.buckets, NUM_REPLICAS, summed.compressor)
        return mesh_exchange(
            summed.buckets, share, NUM_REPLICAS, deadline_s=600.0, compressor=summed.compressor
        )

    if not isinstance(trainer, LocalStepsTrainer):
        return reduced(trainer, link)
    count, shares = len(trainer.fragments), [link] * len(trainer.fragments)
    if link is not None:
        shares = [FragmentLink(link, index, count) for index in range(count)]
    return FragmentExchange(
        [reduced(*each) for each in zip(trainer.fragments, shares, strict=True)]
    )


# ---- losses ----


def measure_losses(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for variant in options.variants:
        first = found.get("every step")
        target = first["losses"][-1][1] if first else options.target
        order = {**vars(options), "variant": variant}
        for so_far in losses_of(order, target if variant != "every step" else None):
            found[variant] = so_far
            options.out.write_text(json.dumps(found))
        print(variant, found[variant]["losses"][-1], flush=True)


def losses_of(order: dict[str, Any], target: float | None) -> Iterator[dict[str, Any]]:
    """Yields {"losses": [(step, test loss), ...]} every 50 steps, until it is as low as the
    target."""
    job = job_of(order)
    x, y = load_data(job, ALLOWED, DataSources())["test"].take(torch.arange(300))
    trainer = trainer_of(job, range(NUM_REPLICAS))
    exchange = exchange_of(trainer, None)
    losses: list[tuple[int, float]] = []
    num_params = sum(param.numel() for param in trainer.model.parameters())
    num_steps: int = order["steps" if order["variant"] == "every step" else "most"]
    for step in range(1, num_steps + 1):
        trainer.train_step(exchange, range(NUM_REPLICAS), NUM_REPLICAS)
        if step % 50 and step != num_steps:
            continue
        trainer.evaluator()
        with torch.no_grad():
            logits = trainer.model(x)
            loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
        losses.append((step, loss))
        print(order["variant"], step, f"{loss:.4f}", flush=True)
        yield {"losses": losses, "num_params": num_params}
        if target is not None and loss <= target:
            return


# ---- seconds ----


def measure_seconds(options: argparse.Namespace) -> None:
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for mbit in options.mbit:
        with switch(mbit) as names, members(names, CABLE, __file__, "member") as processes:
            for variant in options.variants:
                order = {**vars(options), "files": [], "out": "", "variant": variant}
                for process in processes:
                    tell(process, order)
                introduce(processes)
                steps = steps_of([hear(process) for process in processes])
                found.setdefault(f"{mbit:g}", {})[variant] = steps
                print(f"{mbit:g} Mbit/s", variant, said(order, steps), flush=True)
                options.out.write_text(json.dumps(found))


@contextmanager
def switch(mbit: float) -> Iterator[list[str]]:
    """A namespace for each member, and one with a switch that they are connected to."""
    hub = f"slow-{os.getpid()}-hub"
    names = [f"slow-{os.getpid()}-{rank}" for rank in range(NUM_REPLICAS)]
    limit = f"root tbf rate {mbit}mbit burst 64kb latency 400ms"

    def run(words: str) -> None:
        subprocess.run(words.split(), check=True)

    try:
        for name in (hub, *names):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
        run(f"ip -n {hub} link add switch type bridge")
        run(f"ip -n {hub} link set switch up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            run(f"ip link add {CABLE} netns {name} type veth peer {port} netns {hub}")
            run(f"ip -n {name} address add {host(rank)}/24 dev {CABLE}")
            run(f"ip -n {name} link set {CABLE} up")
            run(f"ip -n {hub} link set {port} master switch up")
            run(f"ip netns exec {name} tc qdisc add dev {CABLE} {limit}")
            run(f"ip netns exec {hub} tc qdisc add dev {port} {limit}")
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(("ip", "netns", "delete", name), check=False)


def host(rank: int) -> str:
    return f"{NETWORK}.{rank + 1}"


def steps_of(members: list[list[list[float]]]) -> list[float]:
    """What each step takes, of the (seconds of the processor, seconds waited) of each member."""
    return [
        max(computed_s for computed_s, _ in each) + min(waited_s for _, waited_s in each)
        for each in zip(*members, strict=True)
    ]


def said(order: dict[str, Any], steps: list[float]) -> str:
    """What was measured in words: of a whole run its time, else that of a step."""
    if order["what"] == "seconds":
        return f"{per_step(order['variant'], steps):.3f} s/step"
    return f"{sum(steps) / 60:.2f} min for {len(steps)} steps"


def serve(rank: int) -> None:
    """One member: times steps of the variants that it is told."""
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        order = json.loads(line)
        is_timed = order["what"] == "seconds"
        job, owned = job_of(order, is_timed=is_timed), range(rank, rank + 1)
        trainer = trainer_of(job, owned)
        link = form_gloo(rank, NUM_REPLICAS, host(rank), rendezvous, 60.0)
        exchange = exchange_of(trainer, link)
        overlap = VARIANTS[order["variant"]].get("options", {}).get("overlap_steps", 0)
        num_steps = NUM_TIMED + overlap if is_timed else order["whole_steps"]
        seconds = time_steps(trainer, exchange, owned, num_steps)
        exchange.close()
        print(json.dumps(seconds), flush=True)


def time_steps(
    trainer: Any, exchange: Any, owned: range, num_steps: int
) -> list[tuple[float, float]]:
    """Of each of some steps the seconds of the processor, and those waited for others."""
    seconds = []
    for _ in range(num_steps):
        began_s = time.thread_time()
        report = trainer.train_step(exchange, owned, NUM_REPLICAS)
        seconds.append((time.thread_time() - began_s, report.exchange_wait_s))
    return seconds


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# ---- the report ----


def report(losses: dict[str, Any], seconds: dict[str, Any], target: float | None = None) -> None:
    """Print the time to the target, by link and variant; unless given, the last loss of "every
    step"."""
    first = losses["every step"]
    target = first["losses"][-1][1] if target is None else target
    steps = next(step for step, loss in first["losses"] if loss <= target)
    print(f"{first['num_params']:,} parameters; test loss {target:.4f}: step {steps} of every step")
    print(
        "| Mbit/s | variant | s/step | steps | minutes | times faster |\n|---|---|---|---|---|---|"
    )
    for mbit, by_variant in seconds.items():
        base_s = per_step("every step", by_variant["every step"]) * steps
        for variant, found in by_variant.items():
            reached = [step for step, loss in losses[variant]["losses"] if loss <= target]
            each_s = per_step(variant, found)
            if reached:
                total_s = each_s * reached[0]
                end = f"{reached[0]} | {total_s / 60:.1f} | {base_s / total_s:.1f}"
            else:
                last, loss = losses[variant]["losses"][-1]
                end = f"not in {last} ({loss:.4f}) | | "
            print(f"| {mbit} | {variant} | {each_s:.3f} | {end} |")


def plotted(losses: dict[str, Any], seconds: dict[str, Any]) -> str:
    """The test loss against minutes on the slowest link, as SVG."""
    mbit = min(seconds, key=float)
    minutes = {name: per_step(name, steps) / 60 for name, steps in seconds[mbit].items()}
    lines = [
        Line(
            name,
            [step * minutes[name] for step, _ in losses[name]["losses"]],
            [loss for _, loss in losses[name]["losses"]],
        )
        for name in minutes
    ]
    title = f"Test loss against minutes on a link of {mbit} Mbit/s"
    return curve(lines, title=title, unit="minute", width=860).svg_file + "\n"


def per_step(variant: str, steps: list[float]) -> float:
    """What a step takes on average, with its share of an exchange after several of them."""
    options = VARIANTS[variant].get("options", {})
    if not options:
        return mean(steps[1:])
    places = (0, options.get("overlap_steps", 0))
    joins = [s for step, s in enumerate(steps, 1) if step % TIMED_LOCAL_STEPS in places]
    inner_s = median(s for step, s in enumerate(steps, 1) if step % TIMED_LOCAL_STEPS not in places)
    exchange_s = sum(s - inner_s for s in joins) / (NUM_TIMED // TIMED_LOCAL_STEPS)
    num_exchanges: int = options.get("fragments", 1)
    return inner_s + num_exchanges * max(exchange_s, 0.0) / float(options["local_steps"])


if __name__ == "__main__":
    main()
