"""Composite ops kept whole. torch decomposes `linear` or `scaled_dot_product_attention` in C++ above our dispatch; an op
that a pack or an override defines is caught before that, on the AutogradPrivateUse1 key, and keeps its gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torchax_core.entrances import entrance
from torchax_core.forms import MISS
from torchax_core.kernel import DirectKernel, LoweringKernel, ViewKernel
from torchax_core.overrides import Declined, DecliningKernel
from torchax_core.registry import is_composite
from torchax_core.tensor import Tensor, active, make_tensor, resolve_active
from torchax_core.variants import find_op, op_name
from torchax_core.view import View, read_views
from torchax_core.vjp import DifferentiableProgram, differentiable_call, forward_ad_level, has_tangent
from torchax_core.writing import WritingKernel

__all__ = ["capturing", "keep_whole"]

_OUT_FORMS = (
    "aten::kron.out",
    "aten::linalg_matrix_rank.atol_rtol_float_out",
    "aten::linalg_matrix_rank.atol_rtol_tensor_out",
    "aten::linalg_matrix_rank.out",
    "aten::linalg_matrix_rank.out_tol_tensor",
    "aten::matmul.out",
)
"""Composite out= forms that are kept whole whoever defines them: torch's code for them relies on two tensors sharing a
C++ storage, which a View and its base never do, and would leave the `out` as it was."""

_len_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_plain_dispatch = torch.Tensor.__torch_dispatch__
_DispatchKey, _DispatchKeySet = torch._C.DispatchKey, torch._C.DispatchKeySet
# torch compiles its derivative formulas of composite ops (linear_backward, matmul_backward) in for nested tensors only, but
# they hold for any: called on that key, the op is recorded in C++, and comes to `__torch_dispatch__` below autograd.
_BY_FORMULA = (
    _DispatchKeySet(_DispatchKey.AutogradNestedTensor)
    | _DispatchKeySet(_DispatchKey.PrivateUse1)
    | _DispatchKeySet(_DispatchKey.Python)
)
_TRANSFORMS = _DispatchKeySet(_DispatchKey.FuncTorchDynamicLayerBackMode)
_libraries: dict[str, torch.library.Library] = {}
_kept: set[str] = set()
_lock = threading.Lock()


class Capturing(threading.local):
    """Set while a graph is made from torch code, with stand-ins for its tensors: what then becomes of a call that we
    catch. Unset, stand-ins of anybody's are handed to torch's own decomposition."""

    call: Callable[[Any, Any, Any, Any], Any] | None = None


capturing = Capturing()


def keep_whole(func: Any, *, differentiable: bool = False) -> None:
    """From now on calls of the op on device "jax" come to us undecomposed. No effect on ops that are not composite, unless
    torch has no derivative of the op and our definition is `differentiable`."""
    name = op_name(func)
    with _lock:
        if name in _kept or not (differentiable or is_composite(func)):
            return
        namespace = name.partition("::")[0]
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # noqa: TOR901

        ways = _Ways(func)

        @entrance
        def caught(*args: Any, **kwargs: Any) -> Any:
            if active.kernels is None:
                resolve_active()
            environment, trace = active.environment, active.trace
            kernel = environment._kernels.get(func)
            if kernel is None:
                kernel = environment._kernel(func)
            if (
                kernel.__class__ is LoweringKernel
                and trace is None
                and environment._watch is None
                and not _is_grad_enabled()
                and forward_ad_level() < 0
            ):
                # a form is for tensors of ours alone, and no derivative is wanted of them: nothing below would step in
                for call in kernel.calls:
                    result = call(args, kwargs)
                    if result is not MISS:
                        return result
            if _any_foreign(args) or (kwargs and _any_foreign(kwargs.values())):
                return ways.decompose(*args, **kwargs)  # they know the ops that it is made of
            if _len_modes() and _any_stand_in(args, kwargs):
                graph = capturing.call
                return ways.decompose(*args, **kwargs) if graph is None else graph(kernel, func, args, kwargs)
            if trace is None:
                if environment._watch is not None:
                    call = functools.partial(_run, kernel, ways, args, kwargs)
                    return environment._watch.run(func, args, kwargs, call, whole=True)
                return _run(kernel, ways, args, kwargs)
            trace.lift_all(args)
            trace.lift_all(kwargs.values())
            result = trace.known.result(func, kernel, args, kwargs)
            if result is MISS:
                args, kwargs = trace.cut_unwanted(args, kwargs)
                read_views(args)
                result = _run(kernel, ways, args, kwargs)
            trace.note(result)
            return result

        library.impl(name.partition("::")[2], caught, "AutogradPrivateUse1")
        _kept.add(name)


_PLAIN = frozenset({Tensor, View, type(None), bool, int, float, str, torch.dtype})


def _any_foreign(values: Any) -> bool:
    """Whether a tensor among the arguments is of a class with a `__torch_dispatch__` of its own, which holds tensors of ours
    (DTensor)."""
    for value in values:
        cls = value.__class__
        if cls in _PLAIN:
            continue
        if cls is list or cls is tuple:
            if _any_foreign(value):
                return True
        elif isinstance(value, torch.Tensor) and not isinstance(value, (Tensor, FakeTensor, FunctionalTensor)):
            if cls.__torch_dispatch__ is not _plain_dispatch:
                return True
    return False


def _any_stand_in(args: Any, kwargs: Any) -> bool:
    """Whether a tensor among the arguments is a fake or functional one, which stand for ours while a graph is made."""
    return any(
        isinstance(leaf, (FakeTensor, FunctionalTensor)) or torch._C._functorch.is_functionaltensor(leaf)
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    )


class _Ways:
    """What else than our kernel can run a composite op, looked for once.

    decompose: torch's own decomposition of it; the formula, if it has none.
    formula:   the op as a whole under torch's derivative formula for it, if there is one; else the decomposition.
    """

    def __init__(self, func: Any) -> None:
        composite = _DispatchKey.CompositeImplicitAutograd  # without one, the op's own error says so
        by_key = functools.partial(func._op_dk, composite)
        self.decompose: Callable[..., Any] = func.decompose if composite in func.py_kernels else by_key
        self.formula = self.decompose
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd"):
            self.formula = functools.partial(_by_formula, func)
            if not is_composite(func):
                self.decompose = self.formula


def _by_formula(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func.redispatch(_BY_FORMULA | torch._C._dispatch_tls_local_include_set() & _TRANSFORMS, *args, **kwargs)


def _run(kernel: Any, ways: _Ways, args: Any, kwargs: Any) -> Any:
    try:
        return _chosen(kernel, ways, args, kwargs)
    except Declined:  # by a pack; what an override declines, its DecliningKernel hands on
        return ways.decompose(*args, **kwargs)


def _chosen(kernel: Any, ways: _Ways, args: Any, kwargs: Any) -> Any:
    if isinstance(kernel, DecliningKernel):
        return kernel.ask(lambda asked: _chosen(asked, ways, args, kwargs))
    definition = getattr(kernel, "definition", None)
    if isinstance(kernel, WritingKernel):
        if not _any_differentiable(args, kwargs):
            return kernel(args, kwargs)
        if kernel.variant is None or not kernel.variant.outs:
            return ways.decompose(*args, **kwargs)
        raise RuntimeError(
            f"{kernel.func.overloadpacket.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    if definition is None or definition.origin.pack == "torch":
        return ways.decompose(*args, **kwargs)
    if torch._C._are_functorch_transforms_active() and _any_wrapped(args, kwargs):
        return ways.decompose(*args, **kwargs)  # torch.func differentiates and batches the ops that it is made of
    if isinstance(kernel, DirectKernel):
        return kernel(args, kwargs)
    if not _any_differentiable(args, kwargs):
        return kernel(args, kwargs)
    if isinstance(kernel, ViewKernel) and definition.origin.pack == "override":
        raise RuntimeError(
            f"{definition.op} is overridden by a view ({definition.origin}), through which no gradient can flow: torch makes "
            "this op of others, and has no formula for it. Override those, or the op by torch code that calls them."
        )
    source = definition.gradients_by(args, kwargs)
    if source == "formula" and forward_ad_level() < 0:  # these formulas are for the backward alone
        return ways.formula(*args, **kwargs)
    if source != "vjp" or not isinstance(kernel, LoweringKernel):
        return ways.decompose(*args, **kwargs)
    return differentiable_kernel(kernel, args, kwargs)


def _any_wrapped(args: Any, kwargs: Any) -> bool:
    """Whether a tensor among the arguments is what torch.func's transformations wrap one in."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(leaf, torch.Tensor) and wrapped(leaf) for leaf in pytree.tree_leaves((args, kwargs)))


def _any_differentiable(args: Any, kwargs: Any) -> bool:
    """Whether a derivative, backward or forward, is to be recorded for a call."""
    if torch.is_grad_enabled() and (_any_requires_grad(args) or _any_requires_grad(kwargs.values())):
        return True
    return forward_ad_level() >= 0 and any(
        isinstance(leaf, torch.Tensor) and has_tangent(leaf) for leaf in pytree.tree_leaves((args, kwargs))
    )


def _any_requires_grad(values: Any) -> bool:
    for value in values:
        cls = value.__class__
        if cls is Tensor or cls is View:
            if value.requires_grad:
                return True
        elif cls is list or cls is tuple:
            if _any_requires_grad(value):
                return True
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def differentiable_kernel(kernel: LoweringKernel, args: Any, kwargs: Any) -> Any:
    """Run a lowering with gradients by jax.vjp of its body."""
    tensors = _flat_operands(kernel, args, kwargs)
    entry, arrays = kernel._enter(args, kwargs)
    program = entry.made.get("program")
    if program is None:
        body = entry.body
        avals = [a for group in entry.avals for a in (group if isinstance(group, list) else [group]) if a is not None]
        program = entry.made["program"] = DifferentiableProgram(
            body if entry.single is None else lambda *xs: (body(*xs),),
            wrap=lambda i, array: make_tensor(array, avals[i]),
        )
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            arrays[i] = tensor
    results = differentiable_call(program, arrays)
    if entry.single is not None:
        return results[0]
    left = iter(results)
    out: list[Any] = []
    for group in entry.avals:
        if isinstance(group, list):
            out.append([next(left) for _ in group])
        else:
            out.append(None if group is None else next(left))
    return entry.structure(out)


def _flat_operands(kernel: LoweringKernel, args: Any, kwargs: Any) -> list[Any]:
    """The Tensors of a call, one per array of its flat list, in the kernel's order; None for numbers.

    Views are read: one array per tensor from here on, since gradients are with respect to the views.
    """
    flat: list[Any] = []

    def visit(value: Any, kind: str) -> None:
        if value.__class__ is Tensor:
            flat.append(value)
        elif isinstance(value, torch.Tensor):
            if isinstance(value, View):
                value._array()
            flat.append(value if isinstance(value, Tensor) else None)
        elif value is None or kind in ("static", "generator"):
            return
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item, "tensor" if kind == "tensors" else kind)
        else:
            flat.append(None)

    for value, kind in zip(args, kernel.kinds, strict=False):
        visit(value, kind)
    for name, value in kwargs.items():
        visit(value, kernel.kinds_by_name[name])
    return flat


for _func in filter(None, map(find_op, _OUT_FORMS)):  # a torch without one has nothing to keep
    keep_whole(_func)
