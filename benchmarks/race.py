"""The same work by this project and by others, on one machine and in turns: who is how fast.

    python benchmarks/race.py --rounds 5 --only first-step population federated mlp transformer

Each round runs every contestant once, in an order that moves on, so that what else the machine does
hits all of them. Printed are medians and least values, CPU seconds, and medians of the ratios per
round: what is ours to that peer. Peers that are not part of this environment get one of their own
below --peers, made at the first time; a peer that cannot be had has a row that says why.

first-step: from the command to the end of the first step on both members, `stratagem run --local 2`
and `torchrun` with plain DDP. population: from the command to its end, the members, generations and
steps of `population.py`. federated: a round of `federated_round.py` with 4 MB and two clients;
federated-default: the same beside what Flower's documentation has its users run.
mlp, transformer: a step of AllReduce through the whole product, one segment, one thread a member.
"""

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers.contests import CONTESTS, Contestant  # noqa: E402


def race(name: str, rounds: int, peers: Path) -> Iterator[str]:
    """The rows of one contest."""
    with ExitStack() as stack:
        contestants = CONTESTS[name](peers, stack)
        running = [each for each in contestants if each.run is not None]
        for turn in range(rounds):
            place = turn % len(running)
            for each in running[place:] + running[:place]:
                if each.run is not None:
                    take_turn(each, is_own=each is contestants[0])
    for each in contestants:
        yield row(name, each, contestants[0])


def take_turn(each: Contestant, *, is_own: bool) -> None:
    """A peer that fails takes part no more, and its row says why."""
    assert each.run is not None
    try:
        each.measures.append(each.run())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        if is_own:
            raise
        each.run, each.reason = None, f"fails: {str(error).strip().splitlines()[-1]}"


def row(name: str, each: Contestant, own: Contestant) -> str:
    if each.run is None:
        return f"| {name} | {each.name} | {each.reason} | | | | | |"
    seconds = [measure.seconds for measure in each.measures]
    cpu = [measure.cpu_s for measure in each.measures]
    memory = [measure.memory for measure in each.measures if measure.memory is not None]
    pairs = list(zip(own.measures, each.measures, strict=True))
    cells = (
        f"{statistics.median(seconds):.4g} ({min(seconds):.4g})",
        "" if math.isnan(cpu[0]) else f"{statistics.median(cpu):.3g}",
        f"{statistics.median(a.seconds / b.seconds for a, b in pairs):.2g}",
        ""
        if math.isnan(cpu[0])
        else f"{statistics.median(a.cpu_s / b.cpu_s for a, b in pairs):.2g}",
        "" if each.target is None else f"{each.target:g}",
        f"{statistics.median(memory):.1f} models" if memory else "",
    )
    return f"| {name} | {each.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTS), default=list(CONTESTS))
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "peers", help="their environments"
    )
    args = parser.parse_args()
    print("| contest | who | s, median (least) | CPU s | ours / its s | CPU | target | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.only:
        for line in race(name, args.rounds, args.peers):
            print(line, flush=True)


if __name__ == "__main__":
    main()
