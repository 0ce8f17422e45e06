"""Server optimizers determine how the mean of a round's updates moves the global parameters.

Each is a pure step over one window of elements in float64,

    (slots, delta) -> (slots, change)      x <- x + change

with delta = mean - x, elementwise, so a fold can apply it window by window. A slot is a number
kept for every element between rounds; `initial` has its first value. There is no bias correction.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.job import WeightAverageSpec
from stratagem.common.strategy import FedAdagrad, FedAdam, FedAvgM, Federated, FedYogi
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import (
    NUM_AVERAGED_KEY,
    Manifest,
    Purpose,
    build_manifest,
    dtype_named,
)
from stratagem.coordinator.store.blobs import BlobStore, BlobWriter
from stratagem.coordinator.updates.finite_result import AVERAGE, SERVER, FiniteResult, Rule
from stratagem.coordinator.updates.floats import (
    Raw,
    Wide,
    finite_elements,
    is_finite,
    narrow,
    storage,
    widen,
)
from stratagem.coordinator.updates.reading import (
    StateReader,
    averaged_names,
    is_trained,
    open_state,
)

# ---- Optimizers ----

Slots = tuple[Wide, ...]
Step = Callable[[Slots, Wide], tuple[Slots, Wide]]


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """A server optimizer: each slot's initial value, keyed by name, and the step function."""

    initial: Mapping[str, float]
    step: Step


def server_optimizer(strategy: Federated) -> ServerOptimizer | None:
    """Return the strategy's server optimizer; None if the mean itself is the next state."""
    chosen = strategy.aggregation
    if isinstance(chosen, FedYogi):
        rate = strategy.options.server_learning_rate
        return fed_yogi(rate, chosen.beta1, chosen.beta2, chosen.tau)
    match strategy.options.server_optimizer:
        case FedAdam(learning_rate=rate, beta1=beta1, beta2=beta2, tau=tau):
            return fed_adam(rate, beta1, beta2, tau)
        case FedAdagrad(learning_rate=rate, tau=tau):
            return fed_adagrad(rate, tau)
        case FedAvgM(learning_rate=rate, momentum=momentum):
            return fed_avg_m(rate, momentum)
        case None:
            return None


def fed_yogi(rate: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedYogi, https://arxiv.org/abs/2003.00295, Algorithm 2; v begins at tau² and stays >= 0."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m, v = slots
        square = delta * delta
        m = beta1 * m + (1 - beta1) * delta
        v = v - (1 - beta2) * square * np.sign(v - square)
        return (m, v), rate * m / (np.sqrt(v) + tau)

    return ServerOptimizer({"m": 0.0, "v": tau * tau}, step)


def fed_adam(rate: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedAdam, https://arxiv.org/abs/2003.00295, Algorithm 2."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m, v = slots
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * (delta * delta)
        return (m, v), rate * m / (np.sqrt(v) + tau)

    return ServerOptimizer({"m": 0.0, "v": tau * tau}, step)


def fed_adagrad(rate: float, tau: float) -> ServerOptimizer:
    """FedAdagrad, https://arxiv.org/abs/2003.00295, Algorithm 2 with beta1 = 0."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        v = slots[0] + delta * delta
        return (v,), rate * delta / (np.sqrt(v) + tau)

    return ServerOptimizer({"v": tau * tau}, step)


def fed_avg_m(rate: float, momentum: float) -> ServerOptimizer:
    """FedAvgM: server momentum, https://arxiv.org/abs/1909.06335."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m = momentum * slots[0] + delta
        return (m,), rate * m

    return ServerOptimizer({"m": 0.0}, step)


# ---- Step during a fold ----
#
# A step reads and writes its files window by window; memory is some windows.
#
# There is one blob per slot, with the optimized tensors in the order of the model, in float32
# (float64 where the tensor is float64). The slots belong to the committed state, but no worker or
# client ever gets them.


def slot_dtype(dtype: str) -> str:
    """Return the type in which a tensor's slots are stored."""
    return "float64" if dtype == "float64" else "float32"


class ServerStep:
    """Applies a server optimizer: moves the state toward the mean, for all windows in order."""

    def __init__(
        self,
        optimizer: ServerOptimizer,
        store: BlobStore,
        base: Digest,
        slots: Sequence[Digest],
        metadata: dict[str, str],
        rule: Rule = SERVER,
    ) -> None:
        """Open the files. base: the present state. slots: the stored slots, in the optimizer's
        order, or none before round 1. rule: names the optimizer in errors."""
        self._optimizer, self.rule = optimizer, rule
        with ExitStack() as files:
            manifest, self._x = open_state(files, store, base)
            self._slots = [open_state(files, store, digest)[1] for digest in slots]
            self._files = files.pop_all()
        self._finite = FiniteResult(manifest, rule)
        self._slot_offset = 0
        self._writers = self._open_writers(store, manifest, metadata)

    def apply(self, dtype: str, offset: int, mean: Wide) -> None:
        """Replace the mean of one window by the optimizer's result, in place; offset: the offset of
        the window in the state. Raises DivergedError if a slot leaves the range of its type."""
        x = self._x.read(dtype, offset, mean.size)
        kept_as = slot_dtype(dtype)
        before = self._read_slots(kept_as, mean.size)
        delta = mean - x
        if not np.isfinite(delta).all():
            delta[~np.isfinite(x)] = 0.0  # what is infinite stays so: its change is no number
        after, change = self._optimizer.step(before, delta)
        np.add(x, change, out=mean)
        for values, writer in zip(after, self._writers, strict=True):
            rounded = np.empty(values.size, storage(kept_as))
            narrow(kept_as, values, rounded)
            if not is_finite(kept_as, rounded):
                place = int(np.argmin(finite_elements(kept_as, rounded)))
                self._finite.refuse(dtype, offset, place, kept_as=kept_as)
            writer.write(rounded.view(np.uint8).data)
        self._slot_offset += mean.size * dtype_named(kept_as).item_bytes

    def commit(self) -> tuple[Digest, ...]:
        """Make the slots durable, and return their digests in the optimizer's order."""
        self._files.close()
        return tuple(writer.commit() for writer in self._writers)

    def abort(self) -> None:
        """Discard the optimizer state (slots) written so far."""
        self._files.close()
        for writer in self._writers:
            writer.abort()

    def _read_slots(self, dtype: str, num: int) -> tuple[Wide, ...]:
        if not self._slots:
            return tuple(np.full(num, first) for first in self._optimizer.initial.values())
        return tuple(slot.read(dtype, self._slot_offset, num) for slot in self._slots)

    def _open_writers(
        self, store: BlobStore, manifest: Manifest, metadata: dict[str, str]
    ) -> list[BlobWriter]:
        averaged = averaged_names(manifest)
        optimized = [spec for spec in manifest.stored() if is_trained(spec, averaged)]
        layout = build_manifest(
            [(spec.name, slot_dtype(spec.dtype), spec.shape) for spec in optimized], Purpose.STATE
        )
        writers = []
        for name in self._optimizer.initial:
            header = header_bytes(replace(layout, metadata={**metadata, "slot": name}))
            writers.append(store.writer(len(header) + layout.total_bytes))
            writers[-1].write(header)
        return writers


# ---- Average over rounds ----
#
# The average of the global parameters over rounds is a state beside the next state.
#
# It has the layout of the state, and all of its content except the trained parameters, which are
# replaced by their averages; evaluations and downloads therefore take an average like any state.
# Memory is some windows.

_UNCHANGED: Final = 0.0


class GlobalAverage:
    """Writes the average over rounds, given all windows of the next state in order.

    average + weight · (parameter − average) in float64, of the parameters as they are stored, and
    rounded once to their type.
    """

    def __init__(self, store: BlobStore, before: Digest, manifest: Manifest, weight: float) -> None:
        """Open the files. before: the average so far; "" before the first update, which copies the
        parameters. manifest: the manifest of the next state. weight: the weight of its parameters
        in the average."""
        self._files, self._weight = ExitStack(), weight
        self._finite = FiniteResult(manifest, AVERAGE)
        self._before: StateReader | None = None
        with self._files:
            num_averaged = 0
            if before:
                earlier, self._before = open_state(self._files, store, before)
                num_averaged = int(earlier.metadata[NUM_AVERAGED_KEY])
            num_averaged += weight != _UNCHANGED
            metadata = {**manifest.metadata, NUM_AVERAGED_KEY: str(num_averaged)}
            header = header_bytes(replace(manifest, metadata=metadata))
            self._writer = store.writer(len(header) + manifest.total_bytes)
            self._writer.write(header)
            self._files = self._files.pop_all()

    def take(self, dtype: str, offset: int, values: Raw, *, is_trained: bool) -> None:
        """Add one window of the next state to the average; offset: the offset of the window in the
        state. is_trained: average the elements, else copy them. Raises DivergedError if an average
        is not finite although the state is."""
        result = values
        if self._before is not None and is_trained:
            result = self._before.read_raw(dtype, offset, values.size)
            if self._weight != _UNCHANGED:
                result = _between(dtype, result, values, self._weight)
                self._finite.check(dtype, offset, result, before=values)
        self._writer.write(result.view(np.uint8).data)

    def commit(self) -> Digest:
        """Make the average durable, and return its digest."""
        self._files.close()
        return self._writer.commit()

    def abort(self) -> None:
        """Discard the average written so far."""
        self._files.close()
        self._writer.abort()


def global_average(
    spec: WeightAverageSpec | None,
    store: BlobStore,
    before: Digest,
    manifest: Manifest,
    round_num: int,
) -> GlobalAverage | None:
    """Return the writer of the average after a round; None if the run has no average by then."""
    if spec is None or not (before or spec.is_due(round_num)):
        return None
    weight = _UNCHANGED
    if spec.is_due(round_num):
        weight = spec.weight(_num_averaged(store, before))
    return GlobalAverage(store, before, manifest, weight)


def _num_averaged(store: BlobStore, average: Digest) -> int:
    if not average:
        return 0
    with ExitStack() as files:
        return int(open_state(files, store, average)[0].metadata[NUM_AVERAGED_KEY])


def _between(dtype: str, before: Raw, after: Raw, weight: float) -> Raw:
    mean, change = np.empty(before.size), np.empty(after.size)
    widen(dtype, before, mean)
    widen(dtype, after, change)
    with np.errstate(over="ignore", invalid="ignore"):
        change -= mean
        change *= weight
        mean += change
    result = np.empty(before.size, storage(dtype))
    narrow(dtype, mean, result)
    return result
