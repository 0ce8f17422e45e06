"""Puts the execution settings of a job onto its model.

The one place that says in which order they go around each other: from inside out, the user's
code, compiled code, 16-bit numbers, checkpointing. Names, parameters and hooks of the model stay
as they are; only `forward` of some modules is replaced.
"""

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from stratagem.common.job import ExecutionSpec, JobSpec, OptimizerSpec
from stratagem.common.model.program import ModelProgram
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy import is_cut
from stratagem.worker.engine.numerics.activation_checkpointing import checkpointed, in_groups
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.layer_support import check_able
from stratagem.worker.engine.numerics.mixed_precision import (
    Forward,
    LossScale,
    autocasting,
    low_dtype,
    lowered,
    single,
)
from stratagem.worker.engine.numerics.model_blocks import Blocks, blocks_of
from stratagem.worker.engine.numerics.torch_compile import (
    CompileGate,
    check_compiler,
    compiled,
    prepare_compiler,
)
from stratagem.worker.models.graph_model import node_modules
from stratagem.worker.models.model_tensors import make_plain


@dataclass(slots=True)
class ModelExecution:
    """The execution of one model: its compile gate, loss scale, and notes for the log."""

    batch_size: int
    gate: CompileGate
    scale: LossScale
    frees_gradients: bool = False
    """Whether gradients have storage from backward to the update only."""
    notes: list[str] = field(default_factory=list)
    """Sentences about settings that are carried out in another way than they say."""

    def begin_batch(self, num_rows: int) -> None:
        """Begins a batch of so many rows (all shards together); only full batches run compiled."""
        self.gate.is_open = num_rows == self.batch_size


def prepare(
    model: nn.Module,
    job: JobSpec,
    device: torch.device,
    randomness: KeyedRandomness,
    numerics: int = CURRENT,
) -> ModelExecution:
    """Applies the execution settings to the model, in place, by these rules of the bits.

    Raises InvalidInputError for what this worker cannot do.
    """
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
        if blocks.program is None:  # what the model does between its blocks
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
    """Applies the settings to the nodes of one rank of a pipeline, in place, as `prepare` does.

    Checkpointing is left to the pipeline's stages. Raises InvalidInputError for what this worker
    cannot do.
    """
    modules = node_modules(model, program)
    own = {node: name for name, node in modules.items() if name not in foreign}
    inside = (named for node, name in own.items() for named in node.named_modules(prefix=name))
    check_able(inside, job.execution, device, trains=not job.only_evaluates)
    execution, wrap = _begin(job, device, randomness)
    execution.notes.extend(make_plain(model, numerics))
    for node in own:
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
    # Without updates there is only compiled code to fuse operations in.
    specs = job.optimizers().values() if spec.fusion and not job.only_evaluates else ()
    for label in (label for each in specs for label in _without_fused_kernels(each)):
        execution.notes.append(
            f"execution.fusion: torch has no fused kernel for {label}; its updates take several"
        )
    return execution, _Wrapper(spec, device, gate, randomness)


def _without_fused_kernels(spec: OptimizerSpec) -> list[str]:
    """Returns the optimizers for which torch has no kernels that do a whole update of a tensor at
    once."""
    fused = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and "fused" in inspect.signature(kind).parameters
    }
    rules = {rule.label: (rule.name or "").lower() for rule in (each.rule for each in spec.rules())}
    return [label for label, name in rules.items() if name not in fused]


@dataclass(frozen=True, slots=True)
class _Wrapper:
    spec: ExecutionSpec
    device: torch.device
    gate: CompileGate
    randomness: KeyedRandomness

    def put_on(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Replace the module's forward pass by what the settings want, without checkpointing."""
        forward: Forward = module.forward
        dtype = low_dtype(self.spec)
        if not is_compiled and dtype is None:
            return  # a module that holds its own method would live until the collector comes by
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
