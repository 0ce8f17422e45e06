"""Federated rounds in which each client keeps some tensors to itself, as the documentation says."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import Prepared, Result, federated_loop, train_one_client

Own = dict[str, Tensor]


def personal_rounds(
    job: JobSpec,
    entrypoints: EntryPoints,
    patterns: Sequence[str],
    forgets: Callable[[int, int], bool] = lambda *_: False,
) -> tuple[Result, list[dict[int, Own]]]:
    """The shared tensors after the last round; and what each client had kept after each, at first
    what all begin with.

    job: without personal layers; patterns: of their names. forgets(round, client): whether a client
    has lost what it kept, before that round.
    """
    assert isinstance(job.strategy, Federated)
    kept: list[dict[int, Own]] = [{} for _ in range(job.strategy.rounds + 1)]
    first: Own = {}

    def train(job: JobSpec, entry: EntryPoints, prepared: Prepared, *rest: Any) -> Any:
        (client, round_num), state = rest[:2], prepared[0].state_dict()
        own = {n: t for n, t in state.items() if any(fnmatchcase(n, p) for p in patterns)}
        first.update({n: t.clone() for n, t in own.items() if n not in first})
        before = {} if forgets(round_num, client) else kept[round_num - 1].get(client, {})
        for name, tensor in own.items():
            tensor.copy_((before or first)[name])
        done = train_one_client(job, entry, prepared, *rest)
        kept[round_num] = {**kept[round_num - 1], **kept[round_num]}
        kept[round_num][client] = {name: tensor.clone() for name, tensor in own.items()}
        return done

    result = federated_loop(job, entrypoints, train_client=train)
    shared = {name: tensor for name, tensor in result.state.items() if name not in first}
    return Result(shared, result.losses), [{-1: first}, *kept[1:]]
