"""SCAFFOLD as its paper says it, option II: rounds whose clients are corrected."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import Prepared, federated_loop, train_one_client, trained_of

Variate = dict[str, Tensor]


class Scaffold:
    """All rounds of a job without `control`: the last model, c, and c_k by client."""

    def __init__(
        self,
        job: JobSpec,
        entrypoints: EntryPoints,
        clients_of: Callable[[int], list[int]] | None = None,
        forgets: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        """forgets(round, client): whether c_k is lost before it; all begin anew after the round."""
        self.c: Variate = {}
        self.own: dict[int, Variate] = {}
        self._round, self._deltas, self._forgets, self._is_anew = 1, list[Variate](), forgets, False
        assert isinstance(job.strategy, Federated)
        self._strategy = job.strategy
        result = federated_loop(job, entrypoints, clients_of, train_client=self._train)
        self.state = result.state
        self._end_round(self._round)

    def _end_round(self, next_round: int) -> None:
        for name, c in self.c.items():
            total = sum(delta[name].double() for delta in self._deltas)
            self.c[name] = (c.double() + total / self._strategy.num_clients).to(c.dtype)
        if self._is_anew:
            self.c, self.own = {n: torch.zeros_like(c) for n, c in self.c.items()}, {}
        self._round, self._deltas, self._is_anew = next_round, [], False

    def _train(self, job: JobSpec, entry: EntryPoints, prepared: Prepared, *rest: Any) -> Any:
        (client, round_num), params = rest[:2], dict(trained_of(prepared[0]))
        if round_num != self._round:
            self._end_round(round_num)
        x = {name: param.detach().clone() for name, param in params.items()}
        zero = {name: torch.zeros_like(value) for name, value in x.items()}
        self._is_anew |= self._forgets(round_num, client)
        own = zero if self._forgets(round_num, client) else self.own.get(client, zero)
        self.c, c = self.c or zero, self.c or zero
        hooks = [p.register_hook(partial(torch.add, c[n] - own[n])) for n, p in params.items()]
        rows, loss, has_learned = train_one_client(job, entry, prepared, *rest)
        for hook in hooks:
            hook.remove()
        reach = self._strategy.options.local_epochs * -(-rows // job.batch_size) * job.optimizer.lr
        way = {n: x[n].double() - param.detach().double() for n, param in params.items()}
        new = {n: own[n].double() - c[n].double() + way[n] / reach for n in way}
        self.own[client] = {n: new[n].to(own[n].dtype) for n in new}
        kept = self.own[client].items()
        self._deltas.append({n: (t.double() - own[n].double()).to(t.dtype) for n, t in kept})
        return 1, loss, has_learned
