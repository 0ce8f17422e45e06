"""The jobs that the crash tests run, one per strategy, small and with several segments."""

from typing import Any

Job = dict[str, Any]

USERLAND = "tests.crash.userland"


def job(strategy: Job, *, model: str = "build", every: int = 2, **kwargs: Any) -> Job:
    """12 steps of momentum SGD (or a few rounds), committed and evaluated every few of them."""
    is_federated = strategy["type"] == "Federated"
    document: Job = {
        "name": "crash",
        "model": {"entrypoint": f"{USERLAND}:{model}", "kwargs": kwargs},
        "data": {"entrypoint": f"{USERLAND}:load"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "batch_size": 8,
        "seed": 3,
        "strategy": strategy,
        "retention": 8,
    }
    unit = "rounds" if is_federated else "steps"
    period = 1 if is_federated else every
    document["evaluation"] = {
        "split": "test",
        "every": f"{period} {unit}",
        "metrics": ["accuracy"],
    }
    if not is_federated:
        document["steps"] = 12
    return document


def paced(strategy: Job, pace_s: float, steps: int = 12) -> Job:
    """A job that takes pace_s seconds per batch, so that a fault can hit it in its middle."""
    document = job(strategy, model="build_paced", pace_s=pace_s)
    return document if strategy["type"] == "Federated" else {**document, "steps": steps}


def population(inner: Job | None = None) -> Job:
    """Four members, three generations of four steps."""
    document = job({"type": "Local"})
    del document["steps"]
    strategy = {
        "type": "PopulationBased",
        "population_size": 4,
        "generations": 3,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Perturbation", "factor": 0.2},
        "options": {"inner": inner or {"type": "Local"}},
    }
    return document | {
        "strategy": strategy,
        "search_space": {
            "optimizer.lr": {"low": 0.001, "high": 1.0, "scale": "log"},
            "model.kwargs.hidden": {"choices": [8, 16]},
            "model.kwargs.dropout": {"low": 0.0, "high": 0.5},
        },
        "steps_per_generation": 4,
        "evaluation": {"metrics": ["accuracy"], "best": "loss", "mode": "min"},
    }


def data_parallel(method: str, num_replicas: int = 4, **options: int) -> Job:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": method},
        "options": options,
    }


def gossip(num_replicas: int = 4, topology: str = "ring") -> Job:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": "Decentralized", "topology": topology},
    }


def pipeline(first: str = "worker-0", last: str = "worker-2") -> Job:
    """The four layers of userland.build on two workers; of 8 rows 3, 3 and 2 at a time."""
    return {
        "type": "ModelParallel",
        "partitions": [
            {"node_ids": ["0", "1"], "target": {"WorkerId": first}},
            {"node_ids": ["2", "3"], "target": {"WorkerId": last}},
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 3},
    }


YOGI: Job = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}


def silos(inner: Job, num_clients: int = 2) -> Job:
    """Federated clients that are parties of their own."""
    return federated(num_clients=num_clients) | {"options": {"inner": inner}}


def federated(num_clients: int = 3, rounds: int = 3, aggregation: Job | None = None) -> Job:
    return {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": rounds,
        "aggregation": aggregation or {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }


LOCAL: Job = {"type": "Local"}
ALL_REDUCE = data_parallel("AllReduce")
PARAMETER_SERVER = data_parallel("ParameterServer")
GOSSIP = gossip()
PIPELINE = pipeline()
FED_AVG = federated()

# Predictions of small batches are bad; here they are taken all the same.
PHASES: Job = {
    "full_steps": 2,
    "predict_steps": 4,
    "correct_every": 2,
    "max_relative_error": 100,
    "min_correlation": -1,
}


def evaluation() -> Job:
    """Ten batches of two rows, over four shards; nothing is trained."""
    document = job(ALL_REDUCE)
    for name in ("optimizer", "batch_size", "steps"):
        del document[name]
    return document | {
        "execution": {"gradient": "None"},
        "evaluation": {"metrics": ["accuracy"], "batch_size": 2, "predictions": True},
    }


JOBS: dict[str, Job] = {
    "Local": job(LOCAL),
    "AllReduce": job(ALL_REDUCE),
    "ParameterServer": job(PARAMETER_SERVER),
    # Each member has residuals that nobody else has.
    "Coded": job(PARAMETER_SERVER) | {"compression": {"codec": "ternary"}},
    "Phases": job(ALL_REDUCE) | {"phases": PHASES},
    "Phases-server": job(PARAMETER_SERVER) | {"phases": PHASES},
    "Gossip": job(GOSSIP),
    "Pipeline": job(PIPELINE),
    # There are workers for one of the two: it computes both shards.
    "Pipelines": job({**data_parallel("AllReduce", 2), "options": {"inner": PIPELINE}}),
    "Evaluation": evaluation(),
    "FedAvg": job(FED_AVG),
    "FedAvg-coded": job(FED_AVG) | {"compression": {"codec": "ternary"}},
    "Silos": job(silos(data_parallel("AllReduce", 2))),
    "Silo-pipelines": job(silos(PIPELINE)),
    "FedYogi": job(federated(aggregation=YOGI)),
    "Population": population(data_parallel("AllReduce", 2)),
    # 10 million weights: more than one piece of the spool.
    "FedAvg-large": job(federated(rounds=1), model="build_large", width=1_000_000),
}
