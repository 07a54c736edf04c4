"""torch.optim inside a trace, unmodified: what the host would compute anew at every step becomes an input of the program.

While a function is traced, hooks around every `optimizer.step()`
- create lazily made state (exp_avg, ...) before the trace looks at it, so that the first program is also the last;
- move host-side step counts onto the device, in float64, the precision Python would have computed their powers in;
- let `lr` be read from the param group before each call: a schedule does not recompile;
- choose torch's own form for recorded steps (`capturable`) where the plain one asks for a step count's or an `lr`'s value;
- guard the other settings of the param groups: changing one does.

Source: https://docs.pytorch.org/docs/stable/optim.html
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchax_core.convert import scalar_array
from torchax_core.filling import Filling
from torchax_core.placement import laid_out_like
from torchax_core.shared_counts import share_equal
from torchax_core.shared_patches import SharedPatches, patch
from torchax_core.tensor import Storage, Tensor, active, wrap_array
from torchax_core.wrapped import Form, is_wrapper, parts

__all__ = ["make_state", "tracing_optimizers"]

# Their plain form branches on numbers that it computes from the step count.
_BRANCHING = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Adamax)


@SharedPatches
def tracing_optimizers(stack: contextlib.ExitStack) -> None:
    """Watch optimizer steps and `zero_grad` while a trace is under way."""
    zero_grad, module_zero_grad = Optimizer.zero_grad, torch.nn.Module.zero_grad

    def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        _note_reset([p for group in self.param_groups for p in group["params"]], set_to_none)
        return zero_grad(self, set_to_none)

    def whole_module_zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        _note_reset(list(self.parameters()), set_to_none)
        return module_zero_grad(self, set_to_none)

    stack.callback(register_optimizer_step_pre_hook(_before).remove)
    stack.callback(register_optimizer_step_post_hook(_after).remove)
    patch(stack, Optimizer, "zero_grad", optimizer_zero_grad)
    patch(stack, torch.nn.Module, "zero_grad", whole_module_zero_grad)


def _note_reset(parameters: list[torch.Tensor], set_to_none: bool) -> None:
    """`zero_grad(set_to_none=True)` before anything was accumulated: the program does not depend on `.grad` being there."""
    trace = active.trace
    if trace is None or not set_to_none:
        return
    for parameter in parameters:
        if _is_our(parameter) and not trace.grad_was_used(parameter):
            trace.reset_grads.add(id(parameter))


@SharedPatches
def _saying_compiling(stack: contextlib.ExitStack) -> None:
    """Have torch say it is compiling: torch.optim reads a step count's value with `.item()` otherwise."""
    patch(stack, torch.compiler, "_is_compiling_flag", True)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    trace = active.trace
    if trace is None or not _is_ours(optimizer):
        return
    under_way = optimizer.__dict__.setdefault("_torchax_steps", 0)
    optimizer.__dict__["_torchax_steps"] = under_way + 1
    if under_way:  # a derived class's step has called its base's
        return
    make_state(optimizer, trace)
    changed = optimizer.__dict__.setdefault("_torchax_settings", [])
    for number, group in enumerate(optimizer.param_groups):
        _guard_settings(trace, optimizer, number, group)
        lr = group.get("lr")
        if isinstance(lr, (int, float)):
            group["lr"] = wrap_array(trace.host_input(lambda g=group: scalar_array(float(g["lr"]))))
            trace.note(group["lr"])
            changed.append((group, "lr", lr))
        # the plain foreach forms take no `lr` on the device, or pass lists of tensors on as if they were numbers
        if group.get("capturable") is False and (
            group.get("foreach", False) is not False or isinstance(optimizer, _BRANCHING)
        ):
            group["capturable"] = True
            changed.append((group, "capturable", False))
    if not optimizer.__dict__.setdefault("_torchax_compiling", False):
        _saying_compiling.__enter__()
        optimizer.__dict__["_torchax_compiling"] = True
    trace.cleanups.append(lambda: _restore(optimizer))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    steps = optimizer.__dict__.get("_torchax_steps", 1) - 1
    if steps:
        optimizer.__dict__["_torchax_steps"] = steps
    else:
        _restore(optimizer)


def _restore(optimizer: Optimizer) -> None:
    state = optimizer.__dict__
    state.pop("_torchax_steps", None)
    if state.pop("_torchax_compiling", False):
        _saying_compiling.__exit__()
    for group, name, value in state.pop("_torchax_settings", ()):
        group[name] = value


def _is_ours(optimizer: Optimizer) -> bool:
    return any(_is_our(p) for group in optimizer.param_groups for p in group["params"])


def _is_our(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) or is_wrapper(parameter)


def make_state(optimizer: Optimizer, trace: Any) -> None:
    """Have the optimizer's state exist, on the device, before the trace meets it; equal step counts as one array."""
    init = getattr(optimizer, "_init_group", None)
    with trace.suspended():
        if init is not None:
            parameters = list(inspect.signature(init).parameters)[1:]
            for group in optimizer.param_groups:
                missing = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
                if missing:
                    with _plain_gradients(missing), _filling():
                        init(group, *[[] for _ in parameters])
        for parameter, state in optimizer.state.items():
            if not _is_our(parameter):
                continue
            for name, value in list(state.items()):
                if isinstance(value, torch.Tensor) and not _is_our(value):
                    wide = value.double() if name == "step" and value.is_floating_point() else value
                    state[name] = wide.to("jax")
                elif isinstance(value, Tensor) and isinstance(
                    parameter, Tensor
                ):  # from a file, it lies on one device as a whole
                    value._store.array = laid_out_like(value._store.array, parameter._store.array)
        if trace.shares_counts:
            for stores in _counts(optimizer, trace).values():
                trace.shared_counts.update((id(array), None) for array in share_equal(stores))


def _counts(optimizer: Optimizer, trace: Any) -> dict[str, list[Storage]]:
    """By name, the storages of the numbers (step counts) that the optimizer has for each parameter and updates all at once;
    of those that the trace has not met yet."""
    counts: dict[str, list[Storage]] = {}
    for group in optimizer.param_groups:
        at_once = group.get("foreach", False) is not False or group.get("fused")
        if not at_once or group.get("differentiable"):
            continue
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if value.__class__ is Tensor and value.dim() == 0 and id(value._store) not in trace.lifted:
                    counts.setdefault(name, []).append(value._store)
    return counts


@contextlib.contextmanager
def _filling() -> Iterator[None]:
    kernels = active.kernels
    active.kernels = Filling(kernels)
    try:
        yield
    finally:
        active.kernels = kernels


@contextlib.contextmanager
def _plain_gradients(parameters: list[torch.Tensor]) -> Iterator[None]:
    """Gradients that have values, 0, in place of those of the trace: some optimizers make their state in the gradients'
    shape and dtype. They take up no memory."""
    traced = [(p, p.grad) for p in parameters]
    for p, grad in traced:
        assert grad is not None
        zeros = [torch.zeros((), dtype=part.dtype, device=part.device).expand(part.shape) for part in parts(grad)]
        p.grad = zeros[0] if isinstance(grad, Tensor) else Form(grad).make(zeros)
    try:
        yield
    finally:
        for p, grad in traced:
            p.grad = grad


def _guard_settings(trace: Any, optimizer: Optimizer, number: int, group: dict[str, Any]) -> None:
    made = optimizer.state  # load_state_dict puts another in its place, of other tensors

    def settings() -> tuple[Any, ...]:
        values: list[Any] = [len(optimizer.param_groups), len(group["params"]), optimizer.state is made]
        values += [
            v for k, v in group.items() if k not in ("params", "lr", "initial_lr") and not isinstance(v, torch.Tensor)
        ]
        values.append(
            sum(map(len, optimizer.state.values()))
        )  # state that the first step makes is an input of the second
        return tuple(values)

    name = f"settings of {type(optimizer).__name__}.param_groups[{number}]"
    trace.guards.append((name, settings, settings()))
