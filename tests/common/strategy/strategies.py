"""Hypothesis strategies for training strategies, and the example documents of the shared form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from stratagem.common import strategy as s
from stratagem.common.strategy.strategies import MAX_CLIENTS, MAX_POPULATION, MAX_REPLICAS

Made = TypeVar("Made")
_counts = st.integers(1, 2**64 - 1)
_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_shares = st.floats(0, 1, exclude_min=True)
_below_1 = st.floats(0, 1, exclude_max=True)
_not_negative = st.floats(0, allow_infinity=False, allow_nan=False).map(abs)
_positive = st.floats(0, exclude_min=True, allow_infinity=False)


def _made(cls: Callable[..., Made], *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Made]:
    """Values of a class from the values of its first fields.

    `st.builds` would look at the signature as well and, if it ever misses a field there, draw a
    second value for one that is given.
    """
    return st.tuples(*parts).map(lambda values: cls(*values))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
_topologies = st.sampled_from(
    ["ring", "complete", "star", "torus", "torus:2x3", "hypercube", "exponential", "random:3"]
)
_targets = _made(s.Tag, _texts) | _made(s.WorkerIdTarget, _texts)


@st.composite
def _data_parallel(draw: st.DrawFn) -> s.DataParallel:
    num_replicas = draw(st.integers(1, MAX_REPLICAS))
    aggregation = draw(
        st.just(s.AllReduce()) | st.just(s.ParameterServer()) | _made(s.Decentralized, _topologies)
    )
    min_replicas = draw(st.just(1) | st.integers(1, num_replicas))
    options = s.DataParallelOptions(
        min_replicas,
        draw(st.sampled_from(["direct", "ring", "native"]))
        if isinstance(aggregation, s.AllReduce)
        else "direct",
    )
    return s.DataParallel(num_replicas, aggregation, options)


@st.composite
def _federated(draw: st.DrawFn) -> s.Federated:
    num_clients = draw(st.integers(1, MAX_CLIENTS))
    aggregation = draw(
        st.just(s.FedAvg())
        | _made(s.FedProx, _not_negative)
        | _made(s.FedYogi, _below_1, _below_1, _positive)
    )
    quorum = draw(st.none() | _shares | st.integers(1, num_clients))
    deadline_s = None if quorum is None else draw(st.none() | _positive)
    selection = draw(
        st.just(s.All())
        | _made(s.Random, _shares)
        | _made(s.ByCapability, st.lists(_texts, max_size=3).map(tuple))
    )
    late: dict[str, Any] = {}
    if deadline_s is not None and isinstance(selection, s.Random) and draw(st.booleans()):
        discount = draw(_made(s.Discount, _shares))
        late = {"late_updates": discount, "max_staleness": draw(_counts)}
    options = s.FederatedOptions(
        local_epochs=draw(_counts),
        quorum=quorum,
        round_deadline_s=deadline_s,
        **late,
        server_learning_rate=draw(_positive) if isinstance(aggregation, s.FedYogi) else 0.01,
    )
    return s.Federated(num_clients, draw(_counts), aggregation, selection, options)


training_strategies: st.SearchStrategy[s.Strategy] = st.one_of(
    st.just(s.Local()),
    _data_parallel(),
    _federated(),
    _made(
        s.ModelParallel,
        st.lists(
            _made(s.Partition, st.lists(_texts, min_size=1, max_size=3).map(tuple), _targets),
            min_size=1,
            max_size=3,
        ).map(tuple),
        st.just(s.DataStore()) | st.just(s.Direct()) | _made(s.Pipeline, _counts),
    ),
    _made(
        s.PopulationBased,
        st.integers(1, MAX_POPULATION),
        _counts,
        _made(s.Truncation, _shares) | _made(s.Binary, _not_negative),
        _made(s.Perturbation, st.floats(0, 1)) | st.just(s.Resample()),
        _made(s.PopulationOptions, st.none() | st.just(s.Local()), st.booleans()),
    ),
    _made(s.Custom, _texts, json_values),
)
EXAMPLES: tuple[str, ...] = (
    '{"type":"Local"}',
    '{"type":"DataParallel","num_replicas":3,"aggregation":{"method":"AllReduce"}}',
    '{"type":"DataParallel","num_replicas":16,"aggregation":{"method":"ParameterServer"}}',
    '{"type":"DataParallel","num_replicas":6,"aggregation":{"method":"Decentralized","topolog'
    'y":"hypercube"}}',
    '{"type":"ModelParallel","partitions":[{"node_ids":["tok","enc"],"target":{"Tag":"a100"}}'
    ',{"node_ids":["dec"],"target":{"WorkerId":"worker-3"}}],"communication":{"protocol":"Pip'
    'eline","micro_batch_size":32}}',
    '{"type":"ModelParallel","partitions":[{"node_ids":["tok"],"target":{"Tag":"cpu"}},{"node'
    '_ids":["enc","dec"],"target":{"Tag":"a100"}}],"communication":{"protocol":"DataStore"}}',
    '{"type":"ModelParallel","partitions":[{"node_ids":["all"],"target":{"WorkerId":"w0"}}],"'
    'communication":{"protocol":"Direct"}}',
    '{"type":"Federated","num_clients":12,"rounds":4,"aggregation":{"method":"FedAvg"},"clien'
    't_selection":{"method":"Random","fraction":0.25}}',
    '{"type":"Federated","num_clients":8,"rounds":20,"aggregation":{"method":"FedProx","mu":0'
    '.05},"client_selection":{"method":"All"}}',
    '{"type":"Federated","num_clients":40,"rounds":100,"aggregation":{"method":"FedYogi","bet'
    'a1":0.9,"beta2":0.99,"tau":0.001},"client_selection":{"method":"ByCapability","required_'
    'tags":["cuda","site-b"]}}',
    '{"type":"PopulationBased","population_size":12,"generations":30,"exploit":{"method":"Tru'
    'ncation","fraction":0.25},"explore":{"method":"Perturbation","factor":0.1}}',
    '{"type":"PopulationBased","population_size":9,"generations":5,"exploit":{"method":"Binar'
    'y","threshold":0.02},"explore":{"method":"Resample"}}',
    '{"type":"Custom","coordinator":"elastic","config":{"min":2,"max":8,"policy":null}}',
)
