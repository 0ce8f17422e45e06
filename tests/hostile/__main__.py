"""What every call answers to many conversations that nobody honest would have.

    python -m tests.hostile [EXAMPLES] [CALL ...]

Starts one coordinator and one worker, sends EXAMPLES (100) conversations of each kind to each call
while undisturbed runs go on, and prints a table: how many were sent, what was answered, the slowest
answer, and how much memory the two processes hold more than before. Ends with status 1 when an
answer is not one that the call promises.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hostile.generate import conversations, damaged, noise
from tests.hostile.promises import Method, methods
from tests.hostile.rig import Rig, calm_runs, nothing_left_behind, under_attack
from tests.hostile.samples import samples


@dataclass
class Row:
    """What became of the conversations of one kind."""

    method: Method
    kind: str
    codes: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self, grown_bytes: int) -> str:
        codes = ", ".join(f"{name} {count}" for name, count in self.codes.most_common())
        number = sum(self.codes.values())
        return (
            f"| {self.method.name} | {self.kind} | {number} | {codes} | {self.worst_s * 1e3:.0f} | "
            f"{grown_bytes / 2**20:+.1f} |"
        )


def drawn(strategy: st.SearchStrategy[list[bytes]], number: int) -> Iterator[list[bytes]]:
    """That many examples, always the same ones."""
    found: list[list[bytes]] = []

    @settings(
        max_examples=number,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(strategy)
    def draw(frames: list[bytes]) -> None:
        found.append(frames)

    draw()
    return iter(found)


def attack(rig: Rig, each: Method, number: int) -> Iterator[Row]:
    """One row for each kind of conversation."""
    valid = [message.SerializeToString() for message in samples(rig.target)[each.name]]
    kinds = {"noise": noise(), "damaged": damaged(valid), "typed": conversations(each.request)}
    for kind, strategy in kinds.items():
        row = Row(each, kind)
        for frames in drawn(strategy, number):
            answer = rig.say(each, frames)
            row.codes["open" if answer.code is None else answer.code.name] += 1
            row.worst_s = max(row.worst_s, answer.seconds)
            if found := answer.wrong(each):
                row.wrong.append(f"{found} to {[frame[:80] for frame in frames[:3]]}")
        yield row


def main(arguments: list[str]) -> int:
    number = int(arguments[0]) if arguments else 100
    wanted = [each for each in methods() if each.name in arguments[1:] or not arguments[1:]]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, under_attack(Path(folder)) as rig:
        for each in methods():
            valid = samples(rig.target)[each.name]
            rig.say(each, [message.SerializeToString() for message in valid])
        print("| call | kind | sent | answers | worst ms | memory MiB |")
        print("|---|---|---|---|---|---|")
        with nothing_left_behind(rig), calm_runs(rig):
            before = sum(rig.rss().values())
            for each in wanted:
                for row in attack(rig, each, number):
                    print(row.line(sum(rig.rss().values()) - before), flush=True)
                    wrong += row.wrong
        print(f"\n{rig.num_calm_runs} undisturbed runs meanwhile")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
