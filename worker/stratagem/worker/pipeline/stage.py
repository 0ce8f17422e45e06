"""Run one stage on a worker: forward and backward of one micro-batch.

The tensors that a stage receives begin a separate autograd graph: each use of a value is one leaf,
so that the gradients of uses in different stages can be added in the order of the model's program.
The module knows neither schedules nor transports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import IntegrityError
from stratagem.common.model.program import ModelInput, leaves
from stratagem.common.model.stages import Boundary, StagePlan
from stratagem.worker.engine.forward_backward import raise_with_names
from stratagem.worker.models.program import Slots, add_uses, evaluate, run_calls
from stratagem.worker.models.tensors import refuse_sparse_gradients
from stratagem.worker.numerics.checkpointing import grouped
from stratagem.worker.numerics.precision import single
from stratagem.worker.pipeline.messages import Message, put_together, take_apart
from stratagem.worker.user_code.call_notes import noted

Place: TypeAlias = tuple[str, int, int]
"""A tensor's key: (node, use of the node's output, index of the tensor in the output)."""


@dataclass(slots=True)
class Kept:
    """The tensors that a stage keeps for one micro-batch between its forward and its backward."""

    entered: dict[int, dict[Place, Tensor]] = field(default_factory=dict)
    """Received tensors as autograd leaves, whose gradients are sent back, keyed by boundary."""
    left: dict[int, dict[Place, Tensor]] = field(default_factory=dict)
    """Sent tensors, for which gradients will come, keyed by boundary."""
    output: Any = None
    """The model's output; None except on the last stage."""
    loss: Tensor | None = None
    """Mean · weight, from which backward begins; None except on the last stage."""
    roots: tuple[list[Tensor], list[Tensor | None]] = field(default_factory=lambda: ([], []))
    """The tensors, and their gradients, from which the second half of a split backward begins."""


class StagePart:
    """Runs forward and backward of the nodes of one stage."""

    def __init__(
        self,
        plan: StagePlan,
        stage: int,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        interval: int | None = None,
        *,
        ends_single: bool,
    ) -> None:
        """Take the nodes of a stage. interval: the number of nodes that are recomputed together in
        backward; None to keep all activations. ends_single: convert the model's 16-bit outputs to
        float32."""
        nodes = set(plan.stages[stage].nodes)
        self._program, self._modules, self._device = plan.program, modules, device
        self._ends_single = ends_single
        self._calls = [call for call in plan.program.calls if call.node in nodes]
        self._stage_modules = nn.ModuleList(modules[call.node] for call in self._calls)
        self._run: Callable[[Any, Slots], None] = self._run_calls
        if interval:
            stage_modules = {node: modules[node] for node in nodes}
            self._run = grouped(self._calls, stage_modules, plan.program.num_uses, interval)
        self.before, self.after = plan.before(stage), plan.after(stage)
        self.is_last = stage == len(plan.stages) - 1
        output = self._program.output if self.is_last else None
        self.reads_input = plan.stages[stage].reads_input or (
            output is not None and any(isinstance(leaf, ModelInput) for leaf in leaves(output))
        )
        self._named = [
            (f"{node}.{name}", param)
            for node in nodes
            for name, param in modules[node].named_parameters()
        ]
        params = {id(p): p for node in nodes for p in modules[node].parameters()}
        self._params = [param for param in params.values() if param.requires_grad]
        self._is_first = True  # no backward pass has made gradients of parameters

    def forward(
        self, given: Any, received: Mapping[int, Message]
    ) -> tuple[Kept, dict[int, Message]]:
        """Run the stage's nodes; return (tensors to keep, the message for each boundary). Gradients
        are recorded if torch's grad mode is on."""
        trace, slots = Kept(), Slots()
        for boundary in self.before:
            trace.entered[boundary.number] = self._enter(boundary, received[boundary.number], slots)
        callee = "the model" if self.reads_input else "a stage"
        with noted(callee, given, self._stage_modules):
            self._run(given, slots)
        sent = {}
        for boundary in self.after:
            message, trace.left[boundary.number] = _leave(boundary, slots)
            sent[boundary.number] = message
        if self.is_last:
            output = evaluate(self._program.output, given, slots)
            trace.output = single(output) if self._ends_single else output
        return trace, sent

    def _run_calls(self, given: Any, slots: Slots) -> None:
        run_calls(self._calls, self._modules, self._program.num_uses, given, slots)

    def backward(self, kept: Kept, received: Mapping[int, Message]) -> dict[int, Message]:
        """Run the whole backward, adding to .grad; return the gradients for earlier stages."""
        tensors, gradients = self._roots(kept, received)
        if tensors:
            self._walk(tensors, gradients)
        return self._gradients(kept)

    def backward_input(self, kept: Kept, received: Mapping[int, Message]) -> dict[int, Message]:
        """Run the half of backward that earlier stages await, keeping the graph; return
        gradients."""
        kept.roots = self._roots(kept, received)
        inputs = [leaf for by_place in kept.entered.values() for leaf in by_place.values()]
        if kept.roots[0] and inputs:
            self._walk(*kept.roots, inputs=inputs, retain_graph=True)
        return self._gradients(kept)

    def backward_weight(self, kept: Kept) -> None:
        """Run the other half of backward, for parameters, in a second walk of the graph."""
        if kept.roots[0] and self._params:
            self._walk(*kept.roots, inputs=self._params)

    def _walk(self, tensors: list[Tensor], gradients: list[Tensor | None], **options: Any) -> None:
        try:
            torch.autograd.backward(tensors, gradients, **options)
        except RuntimeError as error:
            raise_with_names(error, tensors, self._named)
        if self._is_first:  # to look at each is not for every pass
            refuse_sparse_gradients(self._named)
            self._is_first = all(param.grad is None for param in self._params)

    def _enter(self, boundary: Boundary, message: Message, slots: Slots) -> dict[Place, Tensor]:
        values = message.words["values"]
        if [node for node, *_ in values] != list(boundary.uses):
            raise IntegrityError(f"boundary {boundary.number}: other nodes than the plan says")
        entered: dict[Place, Tensor] = {}
        start = 0
        for node, skeleton, needs_grad in values:
            tensors = [t.to(self._device) for t in message.tensors[start : start + len(needs_grad)]]
            start += len(needs_grad)
            for use in boundary.uses[node]:
                inputs = list(tensors)
                for i in range(len(tensors)):
                    if needs_grad[i] and torch.is_grad_enabled():
                        leaf = entered[node, use, i] = tensors[i].detach().requires_grad_()
                        inputs[i] = _Enter.apply(leaf)  # type: ignore[no-untyped-call]
                slots[node, use] = put_together(skeleton, inputs)
        return entered

    def _roots(
        self, trace: Kept, received: Mapping[int, Message]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        tensors: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if trace.loss is not None:
            tensors.append(trace.loss)
            gradients.append(None)
        for number, message in received.items():
            for place, gradient in zip(message.words["places"], message.tensors, strict=True):
                tensors.append(trace.left[number][tuple(place)])
                gradients.append(gradient.to(self._device))
        return tensors, gradients

    def _gradients(self, trace: Kept) -> dict[int, Message]:
        """Return the message of gradients for each boundary over which any are due."""
        sent = {}
        for boundary in self.before:
            if entered := trace.entered[boundary.number]:
                gradients = self._by_place(boundary, entered)
                sent[boundary.number] = Message(
                    list(gradients.values()), {"places": [list(place) for place in gradients]}
                )
        return sent

    def _by_place(self, boundary: Boundary, entered: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        by_place: dict[Place, Tensor] = {}
        for node, uses in boundary.uses.items():
            for number in sorted({i for name, _, i in entered if name == node}):
                gradients = [entered[node, use, number].grad for use in uses]
                merged = list(zip(uses, gradients, strict=True))
                if _is_tail(uses, self._program.num_uses[node]):
                    # The sum begins with these, so they may be added here: fewer bytes.
                    merged = [(uses[-1], add_uses(gradients))]
                by_place |= {(node, use, number): g for use, g in merged if g is not None}
        return by_place


def _leave(boundary: Boundary, slots: Slots) -> tuple[Message, dict[Place, Tensor]]:
    """Return the message of a boundary, and the tensors for which gradients will come."""
    tensors: list[Tensor] = []
    values: list[Any] = []
    awaited: dict[Place, Tensor] = {}
    for node, uses in boundary.uses.items():
        for use in uses:
            leaving: list[Tensor] = []
            skeleton = take_apart(slots.pop((node, use)), leaving)
            awaited |= {
                (node, use, i): tensor for i, tensor in enumerate(leaving) if tensor.requires_grad
            }
            if use == uses[0]:
                values.append([node, skeleton, [tensor.requires_grad for tensor in leaving]])
                tensors += [tensor.detach() for tensor in leaving]
    return Message(tensors, {"values": values}), awaited


def _is_tail(uses: Sequence[int], num_uses: int) -> bool:
    return list(uses) == list(range(num_uses - len(uses), num_uses))


class _Enter(torch.autograd.Function):
    """Identity function behind a leaf, since in-place operations on a leaf itself are forbidden."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
