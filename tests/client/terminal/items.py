"""Items of a followed run, as the coordinator sends them."""

from collections.abc import Iterable
from typing import Any

from stratagem.client.course.views import Event, Phase, Progress


def fact(kind: str, phase: Phase = Phase.RUNNING, sentence: str = "", **payload: Any) -> Event:
    """An event with a fact of the whole run, unless it names a party."""
    return Event(0, 0.0, kind, sentence or kind, {"party": "", **payload}, phase)


def steps(step: int, of: int = 600, **changes: Any) -> Progress:
    """The progress of a run that counts steps."""
    values = {
        "step": step,
        "num_steps": of,
        "loss": 2.834,
        "rows_per_s": 1210.4,
        "num_clients_done": 0,
        "num_clients": 0,
        "segment": 2,
        "num_segments": 5,
        "strategy_phase": "TRAINING",
    }
    return Progress(**{**values, **changes})


def finished(segment: int, **changes: Any) -> Event:
    """A segment of 100 steps and 1,000 rows in 2 s."""
    values = {
        "segment": segment,
        "step": 100 * segment,
        "loss": 0.5,
        "num_rows": 1000,
        "seconds": 2.0,
        "metrics": {"train.grad_norm": 1.0, "test.loss": 0.25, "test.accuracy": 0.9},
    }
    return fact("SegmentFinished", **{**values, **changes})


def selected(round_num: int, clients: int = 4) -> Event:
    return fact("ClientsSelected", round_num=round_num, clients=list(range(clients)))


def update(round_num: int, client: int, loss: float | str = 1.5, num_samples: int = 10) -> Event:
    return fact(
        "UpdateReceived",
        round_num=round_num,
        client=client,
        loss=loss,
        num_samples=num_samples,
        seconds=0.5,
        metrics={"train.max_grad_norm": 9.0},
    )


def rejected(round_num: int, client: int) -> Event:
    return fact("UpdateRejected", round_num=round_num, client=client, reason="late")


def closed(round_num: int, accepted: Iterable[int] = (), **metrics: float | str) -> Event:
    listed = [{"client": client, "num_samples": 10} for client in accepted]
    named = {name.replace("_", ".", 1): value for name, value in metrics.items()}
    return fact("RoundClosed", round_num=round_num, accepted=listed, reason="enough", metrics=named)


def generation(number: int, scores: list[float | None], best: int, copies: int = 0) -> Event:
    return fact(
        "GenerationClosed",
        generation=number,
        scores=scores,
        best=best,
        metrics={} if scores[best] is None else {"test.accuracy": scores[best]},
        params={"optimizer.lr": 0.031},
        copied=[{}] * copies,
    )
