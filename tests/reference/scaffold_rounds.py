"""SCAFFOLD as its paper says it, option II: rounds whose clients are corrected."""

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
    """All rounds of a job without `control`: the last model, c, and c_k by client.

    clients_of(round); forgets(round, client): whether c_k is lost before it, after which all begin
    anew.
    """

    def __init__(
        self, job: JobSpec, entry: EntryPoints, clients_of: Any = None, forgets: Any = None
    ) -> None:
        assert isinstance(job.strategy, Federated)
        self._strategy, self._forgets = job.strategy, forgets or (lambda *_: False)
        self.c, self.own = Variate(), dict[int, Variate]()
        self._round, self._deltas, self._is_anew = 1, list[Variate](), False
        self.state = federated_loop(job, entry, clients_of, train_client=self._train).state
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
        is_lost = self._forgets(round_num, client)
        self._is_anew |= is_lost
        own, c = zero if is_lost else self.own.get(client, zero), self.c or zero
        hooks = [p.register_hook(partial(torch.add, c[n] - own[n])) for n, p in params.items()]
        rows, loss, has_learned = train_one_client(job, entry, prepared, *rest)
        for hook in hooks:
            hook.remove()
        reach = self._strategy.options.local_epochs * -(-rows // job.batch_size) * job.optimizer.lr
        way = {n: (x[n].double() - param.detach().double()) / reach for n, param in params.items()}
        new = {n: (own[n].double() - c[n].double() + way[n]).to(c[n].dtype) for n in way}
        self.c, self.own[client] = c, new
        self._deltas.append({n: (t.double() - own[n].double()).to(t.dtype) for n, t in new.items()})
        return 1, loss, has_learned
