"""The pictures of docs/explanation/architecture.md: who talks to whom, a segment, and a round."""

from collections.abc import Mapping
from typing import Final

from docs.sequences import Call, Closed, Divided, Note, Opened, Step, sequence
from stratagem.client.pictures.svg import NumberTable, Picture, element, label, path_of

JOURNAL, LOOP, TASKS = "journal", "loop and core", "effect tasks"
STORE, W0, W1 = "spool, blob store", "worker 0", "worker 1"


def pictures() -> Mapping[str, str]:
    """Return the text of each picture by the name of its file in docs/images."""
    drawn = {"planes": planes(), "segment": segment(), "round": federated_round()}
    return {f"{name}.svg": f"{picture.svg_file}\n" for name, picture in drawn.items()}


def segment() -> Picture:
    """Draw one segment of two workers, and its commit."""
    steps: list[Step] = [
        Call(LOOP, JOURNAL, "MembersFormed"),
        Call(LOOP, TASKS, "RunSegment is due"),
        Call(TASKS, W0, "Execute(TrainPlan, view, fence)"),
        Call(TASKS, W1, "Execute(TrainPlan, view, fence)"),
        Call(W0, TASKS, "Accepted, NeedBlob if the state is missing", is_answer=True),
        Call(TASKS, W0, "SetState"),
        Call(W0, LOOP, "Rendezvous(offer, applied step)"),
        Call(W1, LOOP, "Rendezvous(offer, applied step)"),
        Call(LOOP, W0, "all offers", is_answer=True),
        Call(LOOP, W1, "all offers", is_answer=True),
        Note(W0, W1, "connect, copy the newest state to who is behind"),
        Opened("each step"),
        Note(W0, W1, "forward, backward of the own shards"),
        Call(W0, W1, "gradient buckets"),
        Call(W1, W0, "gradient buckets"),
        Note(W0, W1, "divide by the weight, clip, optimizer step"),
        Call(W0, TASKS, "Progress (latest only)", is_answer=True),
        Closed(),
        Note(W0, W1, "snapshot, evaluate the own batches"),
        Call(W0, TASKS, "TrainResult(metrics, fingerprint)", is_answer=True),
        Call(W1, TASKS, "TrainResult(metrics, fingerprint)", is_answer=True),
        Call(TASKS, LOOP, "fingerprints are equal"),
        Call(LOOP, JOURNAL, "SegmentFinished"),
        Call(LOOP, TASKS, "CommitSegment is due, and the next RunSegment"),
        Opened("at the same time: the next segment, and the commit"),
        Call(TASKS, W0, "Execute(next TrainPlan)"),
        Call(TASKS, W1, "Execute(next TrainPlan)"),
        Divided(),
        Call(TASKS, W0, "GetState(snapshot)"),
        Call(W0, TASKS, "tensor stream, to the blob store", is_answer=True),
        Call(TASKS, LOOP, "digest"),
        Call(LOOP, JOURNAL, "SegmentCommitted"),
        Closed(),
    ]
    title = "One segment of two workers, and its commit"
    return sequence(title, [JOURNAL, LOOP, TASKS, W0, W1], steps)


def federated_round() -> Picture:
    """Draw one round with two clients on one worker."""
    steps: list[Step] = [
        Call(LOOP, JOURNAL, "ClientsSelected"),
        Call(LOOP, JOURNAL, "ClientsAssigned"),
        Call(LOOP, TASKS, "TrainClient 3, then 7"),
        Call(TASKS, W0, "SetState (global state, before it asks)"),
        Call(TASKS, W0, "Execute(ClientRoundPlan, client 3)"),
        Note(W0, W0, "fresh optimizer, own rows"),
        Call(W0, TASKS, "ClientRoundResult(rows, loss)", is_answer=True),
        Note(TASKS, W0, "the compute slot is free: client 7 may begin"),
        Call(TASKS, W0, "GetState(update)"),
        Call(W0, TASKS, "tensor stream", is_answer=True),
        Call(TASKS, STORE, "write, check, sync"),
        Call(TASKS, LOOP, "accepted, with CRC32C"),
        Call(LOOP, JOURNAL, "UpdateReceived"),
        Call(TASKS, W0, "CloseSession(client 3)"),
        Note(LOOP, W0, "the same for client 7"),
        Call(LOOP, JOURNAL, "RoundClosed"),
        Call(LOOP, TASKS, "AggregateRound is due"),
        Call(TASKS, STORE, "read window by window"),
        Call(STORE, TASKS, "next global state", is_answer=True),
        Opened("at the same time"),
        Call(TASKS, W0, "SetState (next global state)"),
        Divided(),
        Call(TASKS, LOOP, "digest"),
        Call(LOOP, JOURNAL, "SegmentCommitted"),
        Closed(),
        Call(LOOP, TASKS, "next round, EvaluateState"),
    ]
    title = "One federated round with two clients on one worker"
    return sequence(title, [JOURNAL, LOOP, TASKS, STORE, W0], steps)


# ---- processes and planes ----

BOX_HEIGHT: Final = 40
Box = tuple[str, float, float, float]
"""Its text, its left edge, its upper edge, its width."""
_CONTROL: Final[Mapping[str, Box]] = {
    "client": ("client", 30, 48, 110),
    "coordinator": ("coordinator", 320, 48, 150),
    "w0": ("worker 0", 600, 34, 110),
    "w1": ("worker 1", 600, 94, 110),
}
_DATA: Final[Mapping[str, Box]] = {
    "w0": ("worker 0", 30, 238, 110),
    "store": ("coordinator: blobs, spool", 285, 238, 200),
    "w1": ("worker 1", 600, 238, 110),
}


def planes() -> Picture:
    """Draw the calls between processes, and the ways of tensors."""
    parts = [
        _plane(8, 148, "control plane: small messages, journaled facts"),
        _plane(174, 158, "data plane: tensors, never journaled"),
        *map(_box, [*_CONTROL.values(), *_DATA.values()]),
        _arrow((140, 68), (318, 68), "SubmitRun, WatchRun, ..."),
        _arrow((470, 58), (598, 50), ""),
        _arrow((470, 78), (598, 108), ""),
        _arrow((600, 126), (472, 86), ""),
        label(535, 44, "Execute, CloseSession", anchor="middle", size=11),
        label(535, 146, "RegisterWorker, Heartbeat, Leave, Rendezvous", anchor="middle", size=11),
        _arrow((140, 258), (283, 258), "states, updates"),
        _arrow((485, 258), (598, 258), "states"),
        element("path", d="M85 238C85 200 655 200 655 238", fill="none", stroke="s2"),
        label(370, 206, "gradient sums (mesh), both ways", anchor="middle", size=11, has_halo=True),
        element("path", d="M85 278C120 318 250 318 300 280", fill="none", stroke="s2"),
        label(385, 312, "ParameterServer: GetGradients, ApplyGradients", anchor="middle", size=11),
    ]
    words = (
        "On the control plane a client submits jobs to the coordinator, which has the workers "
        "execute plans; workers register and send heartbeats. On the data plane workers exchange "
        "gradients with each other, and states and updates with the coordinator's store"
    )
    table = NumberTable((), ())
    return Picture("Processes and planes", words, 760, 340, "".join(parts), table)


def _plane(top: float, height: float, text: str) -> str:
    frame = element("rect", x=8, y=top, width=744, height=height, rx=8, fill="none", stroke="grid")
    return frame + label(20, top + 18, text, fill="muted", weight="600")


def _box(box: Box) -> str:
    text, x, y, wide = box
    shape = {"x": x, "y": y, "width": wide, "height": BOX_HEIGHT, "rx": 6}
    frame = element("rect", **shape, fill="surface", stroke="s1")
    return frame + label(x + wide / 2, y + 25, text, anchor="middle", weight="600")


def _arrow(source: tuple[float, float], target: tuple[float, float], text: str) -> str:
    (x1, y1), (x2, y2) = source, target
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back_x, back_y = x2 - 8 * ux, y2 - 8 * uy
    corners = [(x2, y2), (back_x - 4 * uy, back_y + 4 * ux), (back_x + 4 * uy, back_y - 4 * ux)]
    line = element("line", x1=x1, y1=y1, x2=back_x, y2=back_y, stroke="s1", stroke_width="1.4")
    head = element("path", d=path_of(corners) + "Z", fill="s1")
    at = label((x1 + x2) / 2, (y1 + y2) / 2 - 8, text, anchor="middle", size=11, has_halo=True)
    return line + head + (at if text else "")
