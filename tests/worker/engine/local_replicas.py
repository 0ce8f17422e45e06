"""Jobs with local steps, and all their replicas on one member."""

from typing import Any

from stratagem.common.job import JobSpec
from stratagem.common.strategy import DataParallel
from stratagem.worker.engine import LocalStepsTrainer, build_local_steps_trainer
from stratagem.worker.exchange.reducer import solo_exchange
from stratagem.worker.exchange.sliced_reducer import FragmentExchange
from tests.jobs import job
from tests.worker.engine.support import ALLOWED, CPU, trainer_of


def local_steps_job(
    model: str | dict[str, Any], num_replicas: int, local_steps: int, **changes: Any
) -> JobSpec:
    """changes: options of the strategy under `options`, and sections of the job."""
    options = {"local_steps": local_steps, **changes.pop("options", {})}
    strategy = {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": "AllReduce"},
        "options": options,
    }
    return job(model, strategy=strategy, **{"checkpoint": None, **changes})


def trainer(spec: JobSpec) -> tuple[LocalStepsTrainer, FragmentExchange]:
    """All replicas on one member, as the model is built from the seed."""
    strategy = spec.strategy
    assert isinstance(strategy, DataParallel)
    replicas = range(strategy.num_replicas)
    made = build_local_steps_trainer(spec, ALLOWED, replicas, device=CPU)
    made.load_state(*trainer_of(spec).copy_state())
    return made, solo_fragments(made, len(replicas))


def solo_fragments(made: LocalStepsTrainer, num_replicas: int) -> FragmentExchange:
    """The exchange of a member that has all replicas."""
    return FragmentExchange(
        [solo_exchange(each.buckets, num_replicas, each.compressor) for each in made.fragments]
    )
