"""OpTable: for one environment, which definition an op has, where it came from, and the kernel made of it.

Look-up order: overrides > the core's own device ops > packs by rank > torch's decompositions > CPU fallback > error.
Rank is the user's (Config.pack_order) or what a pack says of itself (TORCHAX_BEFORE).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchax_core import packs as _packs
from torchax_core.config import Config
from torchax_core.errors import DuplicateOpError, OperatorNotFound
from torchax_core.kernel import (
    CaseKernel,
    DataDependentKernel,
    DirectKernel,
    LoweringKernel,
    ViewKernel,
    lowering_kernel,
)
from torchax_core.meta import check_out_dtypes, meta_of
from torchax_core.opset import Definition, Origin, ViewDefinition
from torchax_core.overlap import check_shared_memory
from torchax_core.startup import import_what_torch_will, without_collections
from torchax_core.tensor import become
from torchax_core.variants import Variant, op_name, variant_of
from torchax_core.writing import WritingKernel, become_resized

__all__ = ["OpTable", "Source"]

_kernels: dict[Any, Any] = {}
_lock = threading.RLock()
_TORCH = "torch"


@dataclasses.dataclass(frozen=True)
class Source:
    """One candidate in the chain that `env.explain(op)` shows.

    level:      "override", "core", "pack", "torch decomposition", "torch composite", "cpu fallback".
    definition: the definition, or None where torch's own code is run.
    via:        the functional twin's name if the op is derived from it.
    """

    level: str
    origin: str
    definition: Definition | None = None
    via: str | None = None

    def __str__(self) -> str:
        via = f", derived from {self.via}" if self.via else ""
        kind = f" {self.definition.kind}" if self.definition is not None else ""
        return f"{self.level}{kind}: {self.origin}{via}"


class OpTable:
    """Definitions by op name, for one choice of packs. Shared by environments with equal pack settings."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host = _packs.host()
        self._active: list[_packs.Pack] | None = None
        self._loaded = False

    @property
    def packs(self) -> list[_packs.Pack]:
        """The chosen packs, highest rank first."""
        if self._active is None:
            self._active = self.host.packs(self.config)
            if any(pack.functions for pack in self._active):
                from torchax_core.functions import refresh  # which imports this module

                refresh()  # torch functions are caught from now on; their packs are imported when one is called
        return self._active

    def forget(self) -> None:
        """Look at the packs afresh from now on: one has come, or is to be asked anew."""
        self._active = None
        self._loaded = False

    def load(self) -> None:
        """Load the packs that serve aten, so that the composite ops they keep whole are caught from the first call on."""
        if not self._loaded:
            self._loaded = True
            with without_collections():
                for pack in self.packs:
                    if "aten" in pack.namespaces:
                        self.host.definitions(pack, self.config)
                import_what_torch_will()

    def definition(self, op: str) -> Definition | None:
        """The pack definition of `op` that runs. Raises DuplicateOpError if two packs of no stated rank both have it."""
        found = self.definitions(op)
        return found[0] if found else None

    def definitions(self, op: str) -> list[Definition]:
        """All pack definitions of `op`, the one that runs first: of the pack that the user ranks highest, else of the one
        that says it goes before the others. Raises DuplicateOpError if neither decides."""
        found: list[tuple[_packs.Pack, Definition]] = []
        for pack in self.packs:
            if pack.serves(op):
                definition = self.host.definitions(pack, self.config).get(op)
                if definition is not None:
                    found.append((pack, definition))
        if len(found) > 1 and not any(pack.name in self.config.pack_order for pack, _ in found):
            names = [pack.name for pack, _ in found]
            behind = frozenset().union(*(pack.before for pack, _ in found))
            found.sort(key=lambda each: each[0].name in behind)
            if [pack.name in behind for pack, _ in found].count(False) == 1:
                return [d for _, d in found]
            raise DuplicateOpError(
                f"{op} is defined by {len(found)} packs: "
                + "; ".join(f"{pack.name!r} ({d.origin})" for pack, d in found)
                + f". Rank them with Config(pack_order={tuple(names)!r}), highest first, or block one with "
                f"TORCHAX_PACKS=-{names[-1]}."
            )
        return [d for _, d in found]

    def all_definitions(self) -> Iterator[tuple[_packs.Pack, Definition]]:
        """Every definition of every chosen pack."""
        for pack in self.packs:
            for definition in self.host.definitions(pack, self.config).values():
                yield pack, definition

    # -- from an op to a kernel ------------------------------------------------------------------

    def kernel(self, func: Any) -> Any:
        """The kernel of a torch op, by the first source of its chain. Raises OperatorNotFound."""
        for source, variant in self.chain(func):
            return make_kernel(func, source, variant)
        raise OperatorNotFound(self.not_found_message(func))

    def chain(self, func: Any) -> Iterator[tuple[Source, Variant | None]]:
        """Every way the op could run, best first, overrides apart; and how it follows from its functional twin, if it
        does."""
        name = op_name(func)
        for definition in self.definitions(name):
            yield Source("pack", str(definition.origin), definition), None
        if not self._served(name):
            # torch's decompositions end in ops that only a pack of the namespace has
            if self.config.cpu_fallback:
                yield Source("cpu fallback", _TORCH), None
            return
        view = inplace_view_of(func)
        if view is not None:
            yield Source("core", "the target becomes the view", via=op_name(view)), None
            return
        viewing = view_of_copy(func)
        found = self.definition(op_name(viewing)) if viewing is not None else None
        if isinstance(found, ViewDefinition):
            yield Source("pack", str(found.origin), _copying(name, found), via=op_name(viewing)), None
        variant = variant_of(func) if func._schema.is_mutable else None
        if variant is not None:
            twin = op_name(variant.twin)
            found = self.definition(twin)
            if found is not None:
                yield Source("pack", str(found.origin), found, via=twin), variant
            generic = _torch_definition(variant.twin)
            if generic is not None:
                yield Source(generic[0], str(generic[1].origin), generic[1], via=twin), variant
        else:
            generic = _torch_definition(func)
            if generic is not None:
                yield Source(generic[0], str(generic[1].origin), generic[1]), None
        composite = _composite_call(func)
        if composite is not None:
            yield Source("torch composite", _TORCH), None
        if self.config.cpu_fallback:
            yield Source("cpu fallback", _TORCH), None

    def _served(self, op: str) -> bool:
        return op.partition("::")[0] != "aten" or any("aten" in p.namespaces and p.error is None for p in self.packs)

    def not_found_message(self, func: Any) -> str:
        """What to say of an op nobody defines: the op, the pack that would have it, and the three lines that define it."""
        name = op_name(func)
        variant = variant_of(func) if func._schema.is_mutable else None
        names = {name} if variant is None else {name, op_name(variant.twin)}
        namespace = name.partition("::")[0]
        usual = {"aten": "torchax-ops-aten", "prims": "torchax-ops-aten", "torchvision": "torchax-ops-vision"}
        usual |= dict.fromkeys(("c10d", "_c10d_functional", "_c10d_functional_autograd"), "torchax-ops-c10d")
        lines = [f"no definition of {name} for device 'jax'."]
        serving = [p for p in self.packs if namespace in p.namespaces and p.error is None]
        broken = [p for p in self.packs if p.error is not None]
        for pack in broken:
            lines.append(f"A pack that may have it is broken: {pack.error}")
        for pack in self.packs:
            lines += [f"The pack {pack.name!r} leaves it out: {why}" for op, why in pack.misfits.items() if op in names]
        if not serving:
            if namespace in usual:
                lines.append(f"No installed pack serves the namespace {namespace!r}: `pip install {usual[namespace]}`.")
            else:
                lines.append(
                    f"No installed pack serves the namespace {namespace!r}; one can be written (docs/packs.md)."
                )
        if "sparse" in name or "quantize" in name or "nested" in name:
            lines.append(
                "Tensors on device 'jax' are dense; make it dense first, with `.to_dense()` (or `.dequantize()`)."
            )
        parameters = ", ".join(a.name for a in func._schema.arguments if not a.is_out)
        lines.append("Define it yourself:")
        lines.append(f"    def my_{func._schema.name.partition('::')[2]}({parameters}):")
        lines.append("        return ...  # jax arrays in, jax arrays out")
        lines.append(f"    torchax_core.default_env().override_op_definition({name!r}, my_..., is_jax_function=True)")
        lines.append("or let it run on the CPU: Config(cpu_fallback=True).")
        return "\n".join(lines)


def make_kernel(func: Any, source: Source, variant: Variant | None) -> Any:
    """The kernel for a resolved op; one object per op and definition, so that compiled signatures are shared."""
    key = (func, source.definition or source.level)
    with _lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = _kernels[key] = _make_kernel(func, source, variant)
        return kernel


def _make_kernel(func: Any, source: Source, variant: Variant | None) -> Any:
    definition = source.definition
    if source.level == "core":
        return DirectKernel(func, _become_view(inplace_view_of(func)))
    if source.level == "torch composite" and variant is None:
        return DirectKernel(func, _composite_call(func))  # type: ignore[arg-type]
    if source.level == "cpu fallback":
        return DirectKernel(func, _cpu_call(func))
    assert definition is not None
    if variant is not None:
        if definition.data_dependent is not None:
            return DirectKernel(func, _write_direct(func, variant), definition)
        return WritingKernel(func, definition, variant)
    if isinstance(definition, ViewDefinition):
        if func._schema.returns[0].alias_info is None:
            return LoweringKernel(func, definition)
        return ViewKernel(func, definition)
    if definition.data_dependent is not None:
        return DataDependentKernel(func, definition)
    if definition.kind == "decomposition" and (
        not definition.whole or torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable
    ):
        return DirectKernel(func, definition.body, definition)
    if definition.case is not None:
        return CaseKernel(func, definition)
    return lowering_kernel(func, definition)


def inplace_view_of(func: Any) -> Any:
    """The view op that an op like `t_` or `squeeze_` puts in its target's place; None for other ops."""
    namespace, _, base = func._schema.name.partition("::")
    if torch.Tag.inplace_view not in func.tags or not base.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), base[:-1], None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        view = getattr(packet, overload)
        aliases = [r.alias_info for r in view._schema.returns]
        if aliases and aliases[0] is not None and [(a.name, str(a.type)) for a in view._schema.arguments] == wanted:
            return view
    return None


def view_of_copy(func: Any) -> Any:
    """The view op that `func` is the copying form of: `select.int` of `select_copy.int`. None for other ops."""
    namespace, _, base = func._schema.name.partition("::")
    if torch.Tag.view_copy not in func.tags or not base.endswith("_copy"):
        return None
    packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_copy"), None)
    return getattr(packet, func._overloadname, None)


@functools.cache
def _copying(op: str, view: ViewDefinition) -> Definition:
    """The read of a view op as a lowering."""
    rules = view.rules

    def read(self: Any, *args: Any) -> Any:
        static, traced = (args, ()) if rules.split is None else rules.split(self.shape, *args)
        return rules.read(self, *static, *traced)

    return Definition(op, "lowering", read, view.origin, positional=True)


def _become_view(view: Any) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        become(self, view(self, *args, **kwargs))
        return self

    return run


def _write_direct(func: Any, variant: Variant) -> Callable[..., Any]:
    """A writing form of a data-dependent op: run the twin, then put its results into the arguments."""
    names = [a.name for a in func._schema.arguments]
    sharing: set[Any] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(names, args, strict=False)) | kwargs
        if variant.outs:
            check_shared_memory(func, args, kwargs, [bound[n] for n in variant.outs], sharing)
        taken = {a.name for a in variant.twin._schema.arguments}
        results = variant.twin(**{n: v for n, v in bound.items() if n in taken})
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        new = dict(zip(variant.written, values[variant.fresh :], strict=True))
        if variant.outs:
            metas = {n: meta_of(v) for n, v in bound.items()}
            for name in variant.outs:
                metas[name] = metas[name].new_empty(0)  # of no size that torch would warn of changing
            check_out_dtypes(func, func._schema.arguments, metas, {n: new[n].dtype for n in variant.outs})
        for name, value in new.items():
            target = bound[name]
            if target.shape != value.shape:
                become_resized(target, value.to(target.dtype))
            else:
                target.copy_(value)
        fresh = iter(values)
        out = [next(fresh) if n is None else bound[n] for n in variant.returns]
        return out[0] if len(out) == 1 else tuple(out)

    return run


def _torch_definition(func: Any) -> tuple[str, Definition] | None:
    """torch's own decomposition of an op, as a definition that is traced and compiled as a whole."""
    with _lock:
        if func not in _torch_definitions:
            _torch_definitions[func] = _find_torch_definition(func)
        return _torch_definitions[func]


_torch_definitions: dict[Any, tuple[str, Definition] | None] = {}


def _find_torch_definition(func: Any) -> tuple[str, Definition] | None:
    from torch._decomp import decomposition_table

    name = op_name(func)
    # a ref of an op that C++ composes of others may lead back to the op itself; the C++ composition never does
    body = None if is_composite(func) else decomposition_table.get(func)
    if body is not None:
        return "torch decomposition", Definition(name, "decomposition", body, _origin_of(body))
    if func._schema.is_mutable or any(a.alias_info for a in func._schema.arguments):
        return None
    composite = _composite_call(func)
    if composite is not None:
        return "torch composite", Definition(
            name, "decomposition", composite, Origin("torch", "C++ composite", "torch", 0)
        )
    return None


def is_composite(func: Any) -> bool:
    """Whether torch decomposes the op above every backend (it has a CompositeImplicitAutograd kernel)."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op_name(func), "CompositeImplicitAutograd")
    except RuntimeError:  # an overload of TorchScript's alone ("aten::exp.int"), which the dispatcher does not know
        return False


def _origin_of(body: Callable[..., Any]) -> Origin:
    import inspect

    plain = inspect.unwrap(body)
    code = getattr(plain, "__code__", None)
    if code is None:
        return Origin("torch", getattr(plain, "__module__", "torch"), "torch", 0)
    return Origin("torch", plain.__module__, code.co_filename, code.co_firstlineno)


def _composite_call(func: Any) -> Callable[..., Any] | None:
    """torch's C++ kernel that makes the op of other ops, if it has one that suits any backend."""
    keys = torch._C.DispatchKey
    name = func._name if hasattr(func, "_name") else op_name(func)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CompositeImplicitAutograd"):
        key = keys.CompositeImplicitAutograd
    elif has(name, "CompositeExplicitAutograd"):
        key = keys.CompositeExplicitAutograd
    else:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        return func._op_dk(key, *args, **kwargs)

    return run


def _cpu_call(func: Any) -> Callable[..., Any]:
    """Run an op on CPU copies, write back what it wrote, and say so once."""
    name = op_name(func)
    warned = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if not warned:
            warned = True
            warnings.warn(
                f"{name} has no definition for device 'jax' and runs on the CPU (Config.cpu_fallback), copying both ways.",
                stacklevel=2,
            )
        from torch.utils import _pytree as pytree

        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_cpu(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                copy = value.cpu()
                copies.append((value, copy))
                return copy
            return torch.device("cpu") if isinstance(value, torch.device) else value

        cpu_args, cpu_kwargs = pytree.tree_map(to_cpu, (args, kwargs))
        out = func(*cpu_args, **cpu_kwargs)
        if func._schema.is_mutable:
            for ours, copy in copies:
                ours.copy_(copy)
        back = {id(copy): ours for ours, copy in copies}
        return pytree.tree_map(lambda v: back.get(id(v), v.to("jax")) if isinstance(v, torch.Tensor) else v, out)

    return run
