"""The jobs that the crash tests run, one per strategy, small and with several segments."""

from pathlib import Path
from typing import Any

from tests.gan_jobs import TURNS, gan
from tests.jobs import NOT_TRAINED, document, user_data, user_model

Job = dict[str, Any]
PACED = "acting_models:paced"
"""Takes pace_s seconds per batch."""
ROWS = user_data("classes", num_rows=60, num_test_rows=20)
PREDICTION = "tests.userland.gans:prediction"
RANK_SUM = "tests.userland.metrics:rank_sum"


def crash_job(strategy: Job, *, model: str = "dropout_mlp", every: int = 2, **kwargs: Any) -> Job:
    """12 steps (or a few rounds) over 60 rows, committed and evaluated every few of them."""
    is_federated = strategy["type"] == "Federated"
    period = "1 rounds" if is_federated else f"{every} steps"
    steps = None if strategy["type"] in ("Federated", "PopulationBased") else 12
    return document(
        user_model(model, **kwargs),
        name="crash",
        data=ROWS,
        steps=steps,
        checkpoint=None,
        batch_size=8,
        strategy=strategy,
        retention=8,
        evaluation={"split": "test", "every": period, "metrics": ["accuracy"]},
    )


def paced(strategy: Job, pace_s: float, steps: int = 12) -> Job:
    """A job that takes pace_s seconds per batch, so that a fault can hit it in its middle."""
    whole = crash_job(strategy, model=PACED, pace_s=pace_s)
    return whole if strategy["type"] == "Federated" else {**whole, "steps": steps}


def gated(strategy: Job, folder: Path, steps: int = 12, **sections: Any) -> Job:
    """A job that a test can hold in its middle, at the gates `batch-N` of a folder, or those of its
    clients, `clientC-N`: N counts what one worker takes. Without a gate nothing waits."""
    is_federated = strategy["type"] == "Federated"
    data = user_data("gated_clients" if is_federated else "gated", folder=str(folder))
    whole = {**crash_job(strategy), "data": data, **sections}
    if is_federated:  # their clients have no rows of a split "test"
        return {**whole, "evaluation": None}
    return {**whole, "steps": steps}


def population(inner: Job | None = None) -> Job:
    """Four members, three generations of four steps."""
    strategy = {
        "type": "PopulationBased",
        "population_size": 4,
        "generations": 3,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Perturbation", "factor": 0.2},
        "options": {"inner": inner or {"type": "Local"}},
    }
    return crash_job(strategy) | {
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


def local_steps(method: str = "AllReduce", num_replicas: int = 4, **options: Any) -> Job:
    """Replicas that are joined after every third step."""
    strategy = data_parallel(method, num_replicas)
    return {**strategy, "options": {"local_steps": 3, **options}}


def pipeline(first: str = "worker-0", last: str = "worker-2") -> Job:
    """The four layers of the model on two workers; of 8 rows 3, 3 and 2 at a time."""
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


def robust(name: str, **options: int) -> Job:
    """Five clients, one of which may send what it likes."""
    return federated(num_clients=5) | {"options": {"robust": {"name": name, **options}}}


REGIONS = {"west": [6], "north": [5, 0, 2], "east": [1, 3, 4]}

LOCAL: Job = {"type": "Local"}
ALL_REDUCE = data_parallel("AllReduce")
PARAMETER_SERVER = data_parallel("ParameterServer")
GOSSIP = gossip()
PIPELINE = pipeline()
FED_AVG = federated()

# Noise that can be computed: another run with the same has its bits.
PRIVACY: Job = {
    "clip": {"norm": 0.5, "adaptive": {"quantile": 0.5, "rate": 0.5}},
    "noise_multiplier": 0.2,
    "target": {"delta": 1e-5},
    "noise": "seeded",
}
# What less noise would spend takes each worker's accountant ten seconds to say.
ROW_PRIVACY: Job = {**PRIVACY, "unit": "row", "clip": {"norm": 0.5}, "noise_multiplier": 1.0}
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
    measured = {"metrics": ["accuracy", RANK_SUM], "batch_size": 2, "predictions": True}
    return document(
        "dropout_mlp", **NOT_TRAINED, data=ROWS, strategy=ALL_REDUCE, evaluation=measured
    )


BROUGHT: Job = {
    "entrypoint": "tests.userland.optimizers:SignMomentum",
    "lr": 0.01,
    "schedule": "tests.userland.schedules:sequential",
    "groups": [{"name": "head", "match": ["*3.*"], "optimizer": {"name": "adamw", "lr": 0.01}}],
}
"""Optimizers and a schedule of which much is saved."""


def with_turns(job: Job) -> Job:
    """The same with a GAN; the discriminator's optimizer is one of the user's, and has groups."""
    brought = {key: value for key, value in BROUGHT.items() if key != "schedule"}
    groups = [{**brought["groups"][0], "match": ["disc.3.*"]}]
    discriminator = {**TURNS[0], "optimizer": {**brought, "groups": groups}}
    # Its layer of batch norm needs two rows in each shard.
    data = user_data("classes", num_rows=64, num_test_rows=20)
    sections = gan(turns=[discriminator, TURNS[1]], data=data, predict=PREDICTION)
    return {key: value for key, value in {**job, **sections}.items() if value is not None}


def with_local_steps(strategy: Job) -> Job:
    """Eight segments of a join each."""
    return crash_job(strategy, every=3) | {"steps": 24, "optimizer": BROUGHT}


SETTINGS: Job = {
    "settings": [
        {"from_step": 0, "seed": 5, "params": {"optimizer.lr": 0.1}},
        {"from_step": 4, "seed": 6, "params": {"optimizer.lr": 0.3}},
        {"from_step": 6, "seed": 7, "params": {"model.kwargs.dropout": 0.4}},
    ],
}

CLIPPED: Job = {"optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}}


def slices(**options: Any) -> Job:
    return {**ALL_REDUCE, "options": {"partition_state": "optimizer", **options}}


JOBS: dict[str, Job] = {
    "Local": crash_job(LOCAL),
    # Its metrics are shared: three of the four members have batches.
    "AllReduce": crash_job(ALL_REDUCE)
    | {
        "evaluation": {
            "every": "2 steps",
            "metrics": ["accuracy", RANK_SUM],
            "batch_size": 8,
            "of": "average",
        },
        "weight_average": {"kind": "ema", "decay": 0.9},
        "optimizer": BROUGHT,
    },
    # The first layer has two blocks of the norm, and so two owners.
    "Slices": crash_job(slices(mirror=0), hidden=6000) | CLIPPED,
    # Three of the four members have batches of its evaluations: all gather layers for them.
    "Full": crash_job(slices(partition_state="full", mirror=0), hidden=6000)
    | CLIPPED
    | {"evaluation": {"every": "2 steps", "metrics": ["accuracy"], "batch_size": 8}},
    "Full-mirrors": crash_job(slices(partition_state="full"), hidden=6000)
    | CLIPPED
    | {"evaluation": {"every": "2 steps", "metrics": ["accuracy"], "batch_size": 8}},
    # Those that are left go on, also with the average.
    "Mirrors": crash_job(slices(), hidden=6000)
    | CLIPPED
    | {"weight_average": {"kind": "ema", "decay": 0.9}},
    "ParameterServer": crash_job(PARAMETER_SERVER),
    # Ends within its last segment, the second step of three; of each first one a number is logged.
    "Stopped": crash_job(ALL_REDUCE, every=3) | {"callbacks": "tests.userland.callbacks:StopsLate"},
    # Each member has residuals that nobody else has.
    "Coded": crash_job(PARAMETER_SERVER) | {"compression": {"codec": "ternary"}},
    "Phases": crash_job(ALL_REDUCE) | {"phases": PHASES},
    "Phases-server": crash_job(PARAMETER_SERVER) | {"phases": PHASES},
    "Gossip": crash_job(GOSSIP) | {"optimizer": BROUGHT},
    "DiLoCo": with_local_steps(local_steps()),
    # Every third commit is uploaded as a whole; of the other two jobs the last one alone.
    "DiLoCo-streaming": with_local_steps(local_steps(fragments=3, overlap_steps=1, upload_every=3)),
    "DiLoCo-server": with_local_steps(local_steps("ParameterServer", outer_bits=8)),
    # The loss does not rise: it ends with its second commit, which is then uploaded as a whole.
    "DiLoCo-stopped": with_local_steps(local_steps())
    | {
        "evaluation": {
            "split": "test",
            "metrics": ["accuracy"],
            "every": "3 steps",
            "stop": {"metric": "loss", "mode": "max", "patience": 1},
        }
    },
    "Pipeline": crash_job(PIPELINE) | {"optimizer": BROUGHT},
    # There are workers for one of the two: it computes both shards.
    "Pipelines": crash_job({**data_parallel("AllReduce", 2), "options": {"inner": PIPELINE}})
    | {"weight_average": {"kind": "swa", "every": 2}},
    "Pipelines-server": crash_job(
        {**data_parallel("ParameterServer", 2), "options": {"inner": PIPELINE}}
    ),
    "Evaluation": evaluation(),
    "FedAvg": crash_job(FED_AVG)
    | {
        "callbacks": "tests.userland.callbacks:LogsEvaluations",
        "weight_average": {"kind": "ema", "decay": 0.5},
        "evaluation": {"split": "test", "metrics": ["accuracy"], "of": "average"},
        "recording": {"client_steps": True},
    },
    "FedAvg-coded": crash_job(FED_AVG) | {"compression": {"codec": "ternary"}},
    "Silos": crash_job(silos(data_parallel("AllReduce", 2))),
    "Silo-pipelines": crash_job(silos(PIPELINE)),
    "FedYogi": crash_job(federated(aggregation=YOGI)),
    "Median": crash_job(robust("median")),
    "Krum": crash_job(robust("krum", byzantine=1)),
    "Fair": crash_job(federated() | {"options": {"q": 0.5}}),
    # Neither the regions nor the rows divide evenly, and one region is a client alone.
    "Regions": crash_job(federated(num_clients=7) | {"options": {"regions": REGIONS}}),
    "Nova": crash_job(federated() | {"options": {"normalize": "fednova"}}),
    "Scaffold": crash_job(federated() | {"options": {"control": "scaffold"}})
    | {"optimizer": {"name": "sgd", "lr": 0.1}},
    "OpenRoster": crash_job(
        federated() | {"options": {"roster": {"open": True, "min_clients": 3, "wait_s": 600.0}}}
    ),
    # Two rounds inside each: the first is folded as any, the second is summed.
    "Regions-nested": crash_job(
        federated(num_clients=3)
        | {"options": {"regions": REGIONS, "inner": federated(num_clients=3, rounds=2)}}
    ),
    "Private": crash_job(federated()) | {"privacy": PRIVACY},
    "Rows": crash_job(federated()) | {"privacy": ROW_PRIVACY},
    "Secure": crash_job(federated() | {"options": {"secure_aggregation": {}}}),
    # Of each commit but the first, a part is that of the commit before.
    "Frozen": crash_job(ALL_REDUCE, model="shaped", width=16, is_frozen=True),
    "Turns": with_turns(crash_job(ALL_REDUCE)) | {"weight_average": {"kind": "ema", "decay": 0.9}},
    "Turns-clients": with_turns(crash_job(federated(aggregation=YOGI))),
    "Turns-population": with_turns(population(data_parallel("AllReduce", 2)))
    | {"search_space": {"turns.d.optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"}}},
    "Population": population(data_parallel("AllReduce", 2)),
    "Verified": crash_job(LOCAL) | {"verification": {"sample": 1.0}},
    "Scheduled": crash_job(ALL_REDUCE) | {"hyperparameter_schedule": SETTINGS},
    # 10 million weights: more than one piece of the spool.
    "FedAvg-large": crash_job(federated(rounds=1), model="wide", width=600_000),
}
