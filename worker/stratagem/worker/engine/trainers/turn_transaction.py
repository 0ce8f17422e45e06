"""The transaction of a step with several turns: where one of them fails, those before it are
undone, so that the whole step is done again, perhaps with other members."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from stratagem.worker.engine.optim.weight_average import AVERAGE
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.step.turns import StepTurn, unfreeze
from stratagem.worker.engine.trainers.trainer_state import TrainerState


@contextmanager
def all_or_none(turns: Sequence[StepTurn], saved: TrainerState, step: int) -> Iterator[None]:
    """Is the time in which the turns of the step after `step` are done.

    What turns before the last one will change is copied. The last one changes nothing before all
    of its sums are here.
    """
    of_last = {name for name, _ in turns[-1].params}
    tensors, metadata = saved.live(step)
    kept = {name: t.clone() for name, t in tensors.items() if not _belongs(name, of_last)}
    try:
        yield
    except BaseException:
        live = saved.live(step)[0].items()
        own = {name: tensor for name, tensor in live if _belongs(name, of_last)}
        saved.load({**own, **kept}, metadata)
        raise
    finally:
        unfreeze(saved.params)


def _belongs(name: str, of_last: Set[str]) -> bool:
    """Returns whether only the last turn changes this tensor of a state."""
    if name.startswith(AVERAGE):
        return True
    if name.startswith(state_format.OPTIMIZER):
        name = name.removeprefix(state_format.OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(state_format.MODEL) in of_last
