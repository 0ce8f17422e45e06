"""Apply the execution settings of a job to its model.

Only this module defines the order in which they are nested: from inside out, the user's code,
compiled code, 16-bit numbers, checkpointing. Names, parameters and hooks of the model do not
change; only `forward` of some modules is replaced.
"""

import ctypes
import importlib.util
import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec, JobSpec, OptimizerSpec
from stratagem.common.model.program import ModelProgram
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy import is_cut
from stratagem.worker.data.datasets import BatchPool, DatasetCache, Gather, Readers
from stratagem.worker.models.build import node_modules
from stratagem.worker.models.nodes import program_of
from stratagem.worker.models.tensors import make_plain, rows_dtype
from stratagem.worker.numerics.checkpointing import checkpointed, in_groups
from stratagem.worker.numerics.precision import (
    Forward,
    LossScale,
    autocasting,
    check_able,
    low_dtype,
    lowered,
    single,
)
from stratagem.worker.numerics.randomness import Draws, KeyedRandomness, find_compiler

# ---- Blocks of a model ----
#
# A block is compiled, or computed again, as a whole. For a graph, an nn.Sequential and a model that
# calls its children in a row the blocks are its nodes, in the order of the program, and neighbours
# can be grouped. For any other model they are its repeated layers and other children, determined
# without running it, and cannot be grouped.


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one model; `program` is None if the model has its own forward pass."""

    modules: tuple[nn.Module, ...]
    program: ModelProgram | None


def blocks_of(model: nn.Module, job: JobSpec) -> Blocks:
    """Return a model's blocks in order, each module once."""
    try:
        with _unchanged(model):
            program = program_of(model, job)
    except InvalidInputError:
        return Blocks(_unique(_repeated(model)), None)
    return Blocks(_unique(node_modules(model, program).values()), program)


def layers_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return a model's repeated layers and other children with parameters, each once, without
    running the model."""
    return _unique(_repeated(model))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the modules' attributes at its end, since tracing runs the
    user's forward, which may assign traced values."""
    held = [
        attributes
        for module in model.modules()
        for attributes in (module.__dict__, module._buffers, module._parameters)
    ]
    before = [dict(attributes) for attributes in held]
    try:
        yield
    finally:
        for attributes, values in zip(held, before, strict=True):
            attributes.clear()
            attributes.update(values)


def _unique(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(dict.fromkeys(modules))


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not _is_list(children[0]):
        yield from _repeated(children[0]) if list(children[0].children()) else children
        return
    for child in children:
        if _is_list(child):
            yield from _repeated(child)
        else:
            yield child


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of layers; a Sequential of operations is one layer."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    is_deep = any(list(child.children()) for child in module.children())
    return isinstance(module, nn.Sequential) and is_deep


# ---- Compiled code ----
#
# torch.compile with inductor runs the forward pass of a module. Each shape is compiled separately,
# so the bits of a computation depend on its shape and not on earlier ones. Only full batches are
# compiled: the remainder at the end of an epoch, and evaluation between steps, run eagerly, so
# uneven shards compile no further code. Random numbers are torch's own, drawn from the same seeds
# as in eager code.

MAX_SHAPES: Final = 64
"""Maximum number of input shapes compiled for one piece of code."""


@dataclass(slots=True)
class CompileGate:
    """Chooses compiled or eager code, by the size of the batch and so alike on all members."""

    is_open: bool = False
    is_inference: bool = False
    """True if forward passes without gradients are compiled, because the job only evaluates."""


def check_compiler(mode: str, device: torch.device) -> None:
    """Raise InvalidInputError if this worker cannot compile.

    It must not run eagerly instead, since eager code has other bits than compiled code.
    """
    missing = _missing(device)
    if missing is not None:
        raise InvalidInputError.at(
            "execution.mode",
            f"{mode} needs {missing}, which this worker does not have; "
            "install it on every worker, or choose Eager",
        )


def _missing(device: torch.device) -> str | None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return None if find_compiler() else "a C++ compiler (such as g++)"


def prepare_compiler(device: torch.device) -> None:
    """Configure this process's compiler, which is loaded at its first use."""
    import torch._dynamo.config
    import torch._inductor.config

    # Where compiled code is interrupted, dynamo reads .grad of the tensors that pass.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # Beyond a lower limit code would silently run eagerly, with different bits.
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device.type == "cpu":
        # This avoids a pool of compiler processes for every worker.
        torch._inductor.config.compile_threads = 1


def compiled(
    module: nn.Module,
    forward: Forward,
    gate: CompileGate,
    spec: ExecutionSpec,
    randomness: KeyedRandomness,
) -> Forward:
    """Return the module's compiled forward pass. It is used while the gate is open and gradients
    are on (for a job without training: off); else the eager one."""
    options: dict[str, Any] = {
        "fallback_random": True,
        # It may change the order in which random numbers are drawn.
        "reorder_for_peak_memory": False,
        **({} if spec.fusion else {"max_fusion_size": 1}),
    }
    fast: Forward = torch.compile(forward, dynamic=False, options=options, **_isolation())
    draws: list[Draws] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (gate.is_open and (gate.is_inference or torch.is_grad_enabled())):
            return forward(*args, **kwargs)
        if not draws:
            draws.append(_observe(module, forward, randomness, args, kwargs))
        result = fast(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            randomness.catch_up(draws[0])
        return result

    return run


def _isolation() -> dict[str, Any]:
    """Return compiler options that give each module its own recompile limit, if torch supports
    this; modules of a class share one code object otherwise."""
    wanted = {"recompile_limit": MAX_SHAPES, "isolate_recompiles": True}
    parameters = inspect.signature(torch.compile).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


def _observe(
    module: nn.Module, forward: Forward, randomness: KeyedRandomness, args: Any, kwargs: Any
) -> Draws:
    """Run the module eagerly to observe its random draws, and undo all effects."""
    buffers: list[Tensor] = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        try:
            return randomness.observe(module, lambda: forward(*args, **kwargs))
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


# ---- Preparation of a model ----


@dataclass(slots=True)
class ModelExecution:
    """The execution of one model: compile gate, loss scale, and notes for the log."""

    batch_size: int
    gate: CompileGate
    scale: LossScale
    frees_gradients: bool = False
    """True if gradients have storage only from backward to the update."""
    notes: list[str] = field(default_factory=list)
    """Sentences about settings that are applied differently than written."""

    def begin_batch(self, num_rows: int) -> None:
        """Begin a batch of num_rows rows over all shards; only full batches run compiled code."""
        self.gate.is_open = num_rows == self.batch_size


def prepare(
    model: nn.Module,
    job: JobSpec,
    device: torch.device,
    randomness: KeyedRandomness,
    numerics: int = CURRENT,
) -> ModelExecution:
    """Apply the job's execution settings to the model, in place. numerics: version of the rules
    that decide the bits. Raises InvalidInputError for settings that this worker cannot apply."""
    spec, is_compiled = job.execution, job.execution.mode != "Eager"
    check_able(model.named_modules(), spec, device, trains=not job.only_evaluates)
    execution, wrap = _begin(job, device, randomness)
    execution.notes.extend(make_plain(model, numerics))
    interval = spec.checkpoint_interval
    in_blocks = interval or is_cut(job.strategy) or spec.mode == "Hybrid"
    if not in_blocks:
        wrap.put_on(model, is_compiled=is_compiled)
    else:
        blocks = blocks_of(model, job)
        for block in blocks.modules:
            wrap.put_on(block, is_compiled=is_compiled)
        if interval:
            _checkpoint(model, blocks, interval, execution)
        if blocks.program is None:  # for the code between the blocks
            wrap.put_on(model, is_compiled=False)
    if low_dtype(spec) is not None:
        model.forward = _ending_single(model.forward)
    return execution


def prepare_nodes(
    model: nn.Module,
    job: JobSpec,
    device: torch.device,
    randomness: KeyedRandomness,
    program: ModelProgram,
    foreign: Collection[str],
    numerics: int = CURRENT,
) -> ModelExecution:
    """Apply the settings to the nodes of one pipeline rank like `prepare`, but without
    checkpointing, which stages do."""
    modules = node_modules(model, program)
    name_of = {node: name for name, node in modules.items() if name not in foreign}
    inside = (named for node, name in name_of.items() for named in node.named_modules(prefix=name))
    check_able(inside, job.execution, device, trains=not job.only_evaluates)
    execution, wrap = _begin(job, device, randomness)
    execution.notes.extend(make_plain(model, numerics))
    for node in name_of:
        wrap.put_on(node, is_compiled=job.execution.mode != "Eager")
    return execution


def _begin(
    job: JobSpec, device: torch.device, randomness: KeyedRandomness
) -> "tuple[ModelExecution, _Wrapper]":
    spec, gate = job.execution, CompileGate(is_inference=job.only_evaluates)
    if spec.mode != "Eager":
        check_compiler(spec.mode, device)
        prepare_compiler(device)
        randomness.allow_compiled_code()
    execution = ModelExecution(
        job.batch_size, gate, LossScale.of(spec), frees_gradients=spec.memory == "MinimalPeak"
    )
    # Without updates only compiled code can fuse operations.
    specs = job.optimizers().values() if spec.fusion and not job.only_evaluates else ()
    for label in (label for optimizer in specs for label in _without_fused_kernels(optimizer)):
        execution.notes.append(
            f"execution.fusion: torch has no fused kernel for {label}; its updates take several"
        )
    return execution, _Wrapper(spec, device, gate, randomness)


def _without_fused_kernels(spec: OptimizerSpec) -> list[str]:
    """Return the optimizers that have no fused kernel in torch."""
    fused = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and "fused" in inspect.signature(kind).parameters
    }
    rules = {rule.label: (rule.name or "").lower() for rule in (part.rule for part in spec.rules())}
    return [label for label, name in rules.items() if name not in fused]


@dataclass(frozen=True, slots=True)
class _Wrapper:
    spec: ExecutionSpec
    device: torch.device
    gate: CompileGate
    randomness: KeyedRandomness

    def put_on(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Replace the module's forward pass by one with all settings but checkpointing."""
        forward: Forward = module.forward
        dtype = low_dtype(self.spec)
        if not is_compiled and dtype is None:
            return  # a module that refers to its method would live until the collector runs
        if is_compiled:
            forward = compiled(module, forward, self.gate, self.spec, self.randomness)
        if dtype is None:
            module.forward = forward
        elif self.spec.precision == "Mixed":
            module.forward = autocasting(forward, self.device, dtype)
        else:
            module.forward = lowered(forward, module, dtype)


def _checkpoint(model: nn.Module, blocks: Blocks, interval: int, execution: ModelExecution) -> None:
    if blocks.program is not None:
        modules = node_modules(model, blocks.program)
        model.forward = in_groups(blocks.program, modules, interval)
        return
    for block in blocks.modules:
        block.forward = checkpointed(block.forward, [block])
    if interval > 1:
        execution.notes.append(
            f"execution.gradient: the blocks of {type(model).__name__} cannot be grouped, because "
            f"its forward is its own; Checkpointed: {interval} keeps what enters each block"
        )


def _ending_single(forward: Forward) -> Forward:
    return lambda *args, **kwargs: single(forward(*args, **kwargs))


# ---- Memory modes ----
#
# `execution.memory` has three modes besides the default. Pooled reuses the storage of batches.
# Cached keeps data sets on the device. MinimalPeak gives gradients storage only from their first
# micro-batch's backward to the update, and returns freed memory to the system. None changes bits.


def make_gather(
    job: JobSpec, model: nn.Module, device: torch.device, readers: Readers | None = None
) -> Gather:
    """Make a Gather of rows for the model, by the job's memory setting."""
    memory = job.execution.memory
    return Gather(
        rows_dtype(job, model),
        device,
        pool=BatchPool() if memory == "Pooled" else None,
        cache=DatasetCache() if memory == "Cached" else None,
        readers=readers,
    )


def give_back(device: torch.device) -> None:
    """Return freed memory of this process to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
