"""Running a graph of torch.compile node by node: under the names of the modules that its nodes come from, while it is traced,
and with the user's line at hand, while debug checks look at each op.

dynamo leaves both in the nodes: `nn_module_stack`, `fwd_nn_module_stack` in a backward, and `stack_trace`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchax_core.builtins import from_cpu
from torchax_core.tensor import DEVICE, DEVICE_TYPE, Tensor
from torchax_core.watching import Place, at, is_users

__all__ = ["run_named", "run_watched"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def run_named(graph: torch.fx.GraphModule, inputs: Sequence[Any], prefix: str = "") -> Any:
    """The graph's results; what its nodes compute carries their modules' path, after `prefix`, in HLO and profiles."""
    return _Named(graph, prefix).run(*inputs, enable_io_processing=False)


def run_watched(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """The graph's results, op by op on device "jax", with gradients; checks (watching.py) see each op and the user's line.

    Tensors on the CPU are moved there, and what becomes of them comes back, written and returned.
    """
    moved = {
        i: a.to(DEVICE_TYPE) for i, a in enumerate(inputs) if isinstance(a, torch.Tensor) and not isinstance(a, Tensor)
    }
    if not moved:
        return _Watched(graph).run(*inputs, enable_io_processing=False)
    before = {i: tensor._version for i, tensor in moved.items()}
    with torch.device(DEVICE_TYPE):
        results = _OnDevice(graph).run(*[moved.get(i, a) for i, a in enumerate(inputs)], enable_io_processing=False)
    with torch.no_grad():
        for i, tensor in moved.items():
            if tensor._version != before[i]:
                inputs[i].copy_(tensor)
    given = {id(tensor): inputs[i] for i, tensor in moved.items()}
    return pytree.tree_map_only(torch.Tensor, lambda t: given[id(t)] if id(t) in given else t.cpu(), results)


class _NodeByNode(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors are to say what they say elsewhere


class _OfConstants(_NodeByNode):
    """All of a graph runs on the device, its constants (`torch.tensor([1, 2])` in the function) too."""

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        on_cpu = isinstance(value, torch.Tensor) and not isinstance(value, Tensor) and value.device.type == "cpu"
        return from_cpu(value) if on_cpu else value


class _Named(_OfConstants):
    def __init__(self, graph: torch.fx.GraphModule, prefix: str) -> None:
        super().__init__(graph)
        self.prefix = prefix

    def run_node(self, n: torch.fx.Node) -> Any:
        path = "/".join([*([self.prefix] if self.prefix else []), *_modules(n)])
        if n.op != "call_function" or not path:
            return super().run_node(n)
        with jax.named_scope(path):
            return super().run_node(n)


class _Watched(_NodeByNode):
    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        with at(_place(n)):
            return super().run_node(n)


class _OnDevice(_OfConstants, _Watched):
    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map_only(torch.device, lambda _: DEVICE, (args, kwargs))


def _modules(node: torch.fx.Node) -> list[str]:
    """The modules a node comes from, outermost first, as torchax_core.jit names them (scopes.py)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names: list[str] = []
    above = None
    for source, kind in stack.values():
        short = source.removeprefix(above + ".") if above is not None else re.sub(r"^\w\['\w+'\]\.?", "", source)
        names.append(short or getattr(kind, "__name__", str(kind)))
        above = source
    return names


def _place(node: torch.fx.Node) -> Place | None:
    """The user's line that a node comes from: the innermost outside torch."""
    frames = [(m["file"], int(m["line"])) for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    return next((frame for frame in reversed(frames) if is_users(frame[0])), frames[-1] if frames else None)
