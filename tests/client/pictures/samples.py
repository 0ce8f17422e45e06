"""One small picture of each kind, from fixed values."""

import math
from collections.abc import Callable
from functools import partial

from stratagem.client.pictures.curves import CurveMark, Line, MarkKind, curve
from stratagem.client.pictures.federation import (
    ClientCell,
    RoundBar,
    client_grid,
    histogram,
    rounds,
)
from stratagem.client.pictures.lanes import (
    AWAY,
    DecisionMark,
    Span,
    Stay,
    decisions,
    members,
    time_line,
)
from stratagem.client.pictures.parties import (
    AgainExecuted,
    PartyRow,
    SegmentCheck,
    Task,
    party_tree,
    stages,
    topology,
    verification,
)
from stratagem.client.pictures.population import LineageNode, Trial, lineage, parallel_axes, scores
from stratagem.client.pictures.svg import Picture

STEPS = [10 * n for n in range(1, 13)]
LOSS = [2.3, 1.7, 1.2, 0.9, math.nan, 0.7, 0.61, 0.55, 0.5, 0.47, 0.45, 0.44]
LOW = [loss * 0.8 for loss in LOSS]
HIGH = [loss * 1.3 for loss in LOSS]


def make(text: str = "") -> dict[str, Callable[[int], Picture]]:
    """The pictures by name; each is drawn for a width. text: is in everything that is a text."""

    def draw(
        kind: Callable[..., Picture], *values: object, **named: object
    ) -> Callable[..., Picture]:
        picture = partial(kind, *values, title=f"Sample{text}", **named)
        return lambda width: picture(width=width)

    lines = [
        Line(f"train.loss{text}", STEPS, LOSS, LOW, HIGH, provisional_from=100),
        Line("test.loss", STEPS[3::4], LOSS[3::4], dots=True),
    ]
    marks = [
        CurveMark(50, MarkKind.DEATH, f"worker-1 lost{text}"),
        CurveMark(60, MarkKind.JOIN, "worker-2 joined"),
    ]
    stays = [
        Stay(f"worker-0{text}", "", 0.0, None),
        Stay("worker-1", "", 0.0, 20.0, "its process ended: SIGKILL", is_lost=True),
        Stay("worker-2", f"member0{text}", 24.0, 50.0, f"released{text}"),
    ]
    spans = [Span(f"training{text}", 2.0 * n, 2.0 * n + 1.5, "segment") for n in range(20)]
    spans += [Span("commits", 2.0 * n + 1.6, 2.0 * n + 1.6, f"commit{text}") for n in range(20)]
    tasks = [
        Task(lane, lane + 3.0 * batch, lane + 3.0 * batch + 1, "forward", batch)
        for lane in range(2)
        for batch in range(3)
    ] + [Task(lane, 8.0 - lane, 9.0 - lane, "backward", 0) for lane in range(2)]
    measured = [
        *tasks,
        *(Task(1, each.start - 0.6, each.start, "wait", each.micro_batch) for each in tasks[4:6]),
        *(Task(lane, 9.2, 9.9, "exchange", -1) for lane in range(2)),
        *(Task(lane, 10.0, 10.4 + lane / 4, "optimizer", -1) for lane in range(2)),
    ]
    cells = [
        ClientCell(str(n), state, 0.5 + n / 10, 40 * n, text)
        for n, state in enumerate(["done", "done", "late", "rejected", "selected", ""])
    ]
    bars = [
        RoundBar(n, 2.0 / n, {"done": 7, "late": n % 3, "rejected": n % 2}, 6, 3.0 + n % 4, 6.5)
        for n in range(1, 9)
    ]
    nodes = [
        *(LineageNode(m, 1, m, 0.3 + m / 10, f"lr {m}{text}", wins=m == 2) for m in range(4)),
        *(LineageNode(m, 2, 2 if m == 0 else m, 0.5 + m / 10, wins=m == 0) for m in range(3)),
        LineageNode(3, 2, 3, None),
    ]
    trials = [
        Trial(f"member {n}{text}", {"lr": 0.001 * 7**n, "name": f"adam{text}", "score": n}, n == 3)
        for n in range(4)
    ]
    by_generation = [[0.3, 0.4, None], [0.5, 0.45, 0.2], [0.7, 0.6, 0.65]]
    edges = [(0, 1, 0.3), (1, 2, 0.3), (0, 2, 0.1)]
    parties = [
        PartyRow(f"member0{text}", "Federated/FedAvg", "3 rounds", [2.0, 1.0, 0.5]),
        PartyRow(f"member0{text}/client0", f"Local{text}", "3 segments", [2.1, 1.1]),
        PartyRow("member1", "Federated/FedAvg", "1 round", [2.2], f"out of memory{text}"),
    ]
    noted = [DecisionMark(10.0 * n, f"rung{text}", f"{n}: a goes on{text}") for n in range(1, 4)]
    right = AgainExecuted(["worker-2"], is_right=True)
    wrong = AgainExecuted([f"worker-3{text}"], is_right=False)
    undecided = [AgainExecuted(["worker-2"], None), AgainExecuted(["worker-3"], None)]
    checks = [
        SegmentCheck(1, 0, 20, "verified", executions=[right]),
        SegmentCheck(2, 20, 40, "refuted", [f"worker-0{text}"], [right, right]),
        SegmentCheck(2, 20, 40, "verified", executions=[right]),
        SegmentCheck(3, 40, 60, "not chosen"),
        SegmentCheck(4, 60, 80, "verifier wrong", ["worker-3"], [wrong, right]),
        SegmentCheck(5, 80, 100, "not verified"),
        SegmentCheck(6, 100, 120, "open", ["worker-0"], undecided),
        SegmentCheck(7, 120, 140, "waits"),
    ]
    return {
        "verification": draw(verification, checks),
        "party-tree": draw(party_tree, parties),
        "decisions": draw(decisions, noted, end=40.0),
        "curve": draw(curve, lines, marks),
        "curve-log": draw(curve, lines, log=True, unit="round"),
        "members": draw(members, stays, now=60.0),
        "members-away": draw(members, stays, now=60.0, aways=[(20.0, 24.5), (30.0, 58.0)]),
        "time-line": draw(time_line, spans),
        "time-line-away": draw(time_line, [Span("coordinator", 9.0, 33.0, AWAY), *spans]),
        "topology": draw(
            *(topology, [f"node {n}" for n in range(3)], edges),
            workers=[f"worker-{n // 2}{text}" for n in range(3)],
        ),
        "stages": draw(stages, [f"stage 0{text}", "stage 1"], tasks),
        "stages-measured": draw(stages, [f"stage 0{text}", "stage 1"], measured),
        "client-grid": draw(client_grid, cells),
        "rounds": draw(rounds, bars),
        "lineage": draw(lineage, nodes, best=f"member 0{text}"),
        "scores": draw(scores, by_generation, metric=f"test.accuracy{text}"),
        "parallel-axes": draw(parallel_axes, ["lr", "name", "score"], trials, log=["lr"]),
        "histogram": draw(histogram, [0.1, 0.2, 0.2, 0.9, 0.4], name=f"seconds{text}"),
    }
