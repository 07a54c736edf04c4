"""Kernels: what runs when torch dispatches an op to device "jax". One object per op, made on first use from its schema.

A call goes: scan the arguments into a signature (interned avals, static values, types of scalars) and a flat list of
arrays; look the signature up; run its compiled function; wrap or write the results. Everything that can be done once is
done when a signature is new: torch's own meta kernel checks the call and gives result shapes, strides and dtypes,
promotion is decided, and the lowering is put under `jax.jit`. See docs/dispatch.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import elementwise_dtypes, suggest_memory_format

from torchax_core import log
from torchax_core.convert import array_from_torch, is_traced, scalar_array
from torchax_core.dtypes import jax_dtype, torch_dtype
from torchax_core.errors import (
    DataDependentError,
    LoweringMismatchError,
    OperatorNotFound,
)
from torchax_core.forms import MISS, Form, form_of
from torchax_core.meta import NO_META, aval_of_meta, avals_of, meta_of, run_on_meta
from torchax_core.opset import Definition, ViewDefinition
from torchax_core.overrides import Declined
from torchax_core.placement import alike
from torchax_core.refusals import check_values
from torchax_core.signatures import LEFT_OUT, check_parameters
from torchax_core.symbolic import array_of_symbol
from torchax_core.templates import (
    GENERATOR,
    SCALAR,
    STATIC,
    TENSOR,
    TENSORS,
    cast,
    concrete_template,
    fill,
    hashable,
    jax_value,
    kind_of,
    leaves_of,
    operands_of,
    scalar_dtype,
    template_of,
    to_dtype,
)
from torchax_core.tensor import (
    DEVICE_TYPE,
    Aval,
    ForeignTensorError,
    Tensor,
    active,
    contiguous_stride,
    make_tensor,
    make_wrapper,
)
from torchax_core.variants import Variant, op_name
from torchax_core.view import ROOT, View, make_view, view_wrapper

__all__ = [
    "FORMS",
    "CaseKernel",
    "DataDependentKernel",
    "DirectKernel",
    "LoweringKernel",
    "ViewKernel",
    "arrays_of",
    "forget_signatures",
    "lowering_kernel",
    "wrap_results",
]

_WIDE = frozenset({torch.float64, torch.int64, torch.complex128, torch.uint64})
FORMS = 6  # of calls, per op, that have a function of their own
_PLAIN_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INTEGERS_ONLY = frozenset(
    {
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "gcd",
        "lcm",
        "bitwise_left_shift",
        "bitwise_right_shift",
    }
    | {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"}
)
_CPU_INDICES = frozenset({"index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"})


def _scan_view(view: View, key: list[Any], arrays: list[Any]) -> None:
    """A view that has been read since its base last changed is an array like any other; else its base is given, and it
    is read inside the op's program."""
    key.append(view._aval)
    if view._is_read():
        arrays.append(view._cache)
    else:
        key.append(view._path)
        arrays.append(view._store.array)
        arrays.extend(view._offsets)


def _settled(args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call has a floating tensor, so that torch's default dtype has no say in its result."""
    values = [*args, *kwargs.values()] if kwargs else args
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in leaves_of(values))


class _WrongDevice(Exception):
    """A tensor among the arguments that is on another device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Decomposing(threading.local):
    """The ops whose torch decompositions are being traced in this thread, outermost first."""

    names: tuple[str, ...] = ()


_decomposing = _Decomposing()
_DEEPEST = 8  # an op may decompose into itself on smaller inputs, but not for ever


class _Entry:
    """One signature of one op, compiled: the function of arrays, and what its results are."""

    __slots__ = ("avals", "body", "draws", "formless", "made", "run", "single", "structure", "wide", "wrap")

    def __init__(
        self, body: Callable[..., Any], avals: list[Any], structure: Any, draws: bool, wide: bool, lists: bool
    ) -> None:
        self.draws = draws  # two more arrays: a random key and a count
        self.body = body
        self.wide = wide
        self.run = self.compiled(body)
        if lists:
            self.run = self._seeing_shared(self.run)
        self.avals = avals  # an Aval, None, or a list of avals, per result of the op
        self.structure = structure
        self.single: Any = avals[0] if len(avals) == 1 and isinstance(avals[0], Aval) else None
        if len(avals) > 1 and all(isinstance(a, Aval) for a in avals):
            self.wrap: Callable[[Any], Any] = lambda results: tuple(map(make_tensor, results, avals))
        else:
            self.wrap = lambda results: structure(wrap_results(results, avals))
        self.formless = 0  # calls of this signature that no form knew
        self.made: dict[Any, Any] = {}  # programs made of this one: its gradient, its write through a view

    def compiled(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`body` under jax.jit; if wide, compiled and run with 64-bit types on: some of JAX's primitives (argmax,
        bessel_i0e) are lowered by tracing more JAX code, outside the body, and would narrow there what it kept wide."""
        run = jax.jit(body, inline="donate_argnums" not in options, **options)
        if not self.wide:
            return run

        def run_wide(*arrays: Any) -> Any:
            with jax.enable_x64(True):
                return run(*arrays)

        return run_wide

    def _seeing_shared(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`; in a trace where storages share arrays (shared_counts.py), of a body that is given one for those that are
        the same, so that it computes once what follows from them."""
        made, body = {}, self.body

        def run_lists(*arrays: Any) -> Any:
            if not getattr(active.trace, "shared_counts", None):  # jax transforms of nobody's jit share none
                return run(*arrays)
            places: dict[int, int] = {}
            which = tuple(places.setdefault(id(array), len(places)) for array in arrays)
            if len(places) == len(which):
                return run(*arrays)
            if which not in made:
                made[which] = self.compiled(lambda *few: body(*map(few.__getitem__, which)))
            return made[which](*{id(array): array for array in arrays}.values())

        return run_lists


def _declined(*arrays: Any) -> Any:
    """What a signature runs by whose definition has returned NotImplemented."""
    raise Declined


_all: weakref.WeakSet[LoweringKernel] = weakref.WeakSet()


def forget_signatures() -> None:
    """Let every kernel start anew, without compiled programs."""
    for kernel in list(_all):
        kernel.calls.clear()
        kernel.forms.clear()
        kernel.entries.clear()


class LoweringKernel:
    """Runs a functional op through a pure JAX function (a lowering), or through torch code traced into one."""

    def __init__(self, func: Any, definition: Definition, variant: Variant | None = None) -> None:
        self.func = func
        self.name = op_name(func)
        self.definition = definition
        self.variant = variant
        self.schema = func._schema
        arguments = self.schema.arguments
        static = definition.static
        if definition.kind == "decomposition":
            static = frozenset(a.name for a in arguments)  # torch code branches on its numbers
        self.arguments = arguments
        self.kinds = tuple(kind_of(a, static) for a in arguments)
        self.kinds_by_name = {a.name: k for a, k in zip(arguments, self.kinds, strict=True)}
        # an op that has an argument `key` of its own (attention) asks by the longer name
        names = {a.name for a in arguments}
        self.key_name = next((n for n in ("random_key", "key") if n in definition.parameters and n not in names), None)
        self.accepted = self._accepted_names()
        self.takes_sizes = "batch_sizes" in names  # of packed sequences
        self.takes_lengths = not names.isdisjoint(("input_lengths", "target_lengths"))
        self.func_indexes = self.schema.name.partition("::")[2].rstrip("_") in _CPU_INDICES
        self.depends_on = definition.depends_on
        check = definition.value_check
        # of Python numbers alone, which are no part of the signature but are here to be looked at
        self.number_check = check if check is not None and not check.values else None
        self.lies_like_self = _lies_like_self(func)
        self.entries: dict[Any, _Entry] = {}
        self.calls: list[Callable[[Any, Any], Any]] = []  # of `forms`, in order
        self.forms: dict[Any, Form] = {}
        _all.add(self)

    # -- the call --------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        for call in self.calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        return self.run(args, kwargs)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """A call whose form or signature is new, or that has no form of its own."""
        entry, arrays = self._enter(args, kwargs)
        try:
            results = entry.run(*arrays)
        except Declined:  # the signature is not traced again to hear the same
            entry.run = _declined
            raise
        if entry.formless < FORMS:
            self._remember(args, kwargs, entry, "wrap", entry)
        aval = entry.single
        return entry.wrap(results) if aval is None else make_tensor(results, aval)

    def _remember(
        self, args: Sequence[Any], kwargs: dict[str, Any] | None, entry: _Entry, tail: str, program: Any
    ) -> None:
        """Let the next such call go by its form (see forms.py), if it can."""
        entry.formless += 1  # it came here, so no form knew it; after a few times none ever will
        if entry.draws or not _settled(args, kwargs):
            return
        found = form_of(args, kwargs, self.kinds, self.kinds_by_name)
        if found is None:
            return
        form = self.forms.get((tail, found))
        if form is None:
            if len(self.forms) == FORMS:
                return
            form = self.forms[tail, found] = Form(found, tail, self.depends_on)
            self.calls.append(form.call)
        form.keep(args, kwargs, program)

    def _enter(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[_Entry, list[Any]]:
        key: list[Any] = []
        arrays: list[Any] = []
        generator = None
        try:
            for a, kind in zip(args, self.kinds, strict=False):
                cls = a.__class__
                if cls is Tensor:
                    key.append(a._aval)
                    arrays.append(a._store.array)
                elif cls is View:
                    _scan_view(a, key, arrays)
                elif kind is STATIC and (cls is int or a is None):
                    key.append(a)
                else:
                    self._scan(a, kind, key, arrays)
            if kwargs:
                kinds = self.kinds_by_name
                for name, a in kwargs.items():
                    kind = kinds[name]
                    key.append(name)
                    if kind is GENERATOR:
                        generator = a
                    else:
                        self._scan(a, kind, key, arrays)
        except _WrongDevice as wrong:
            raise self._device_error(wrong.tensor, args, kwargs or {}) from None
        key.append(torch.get_default_dtype())  # what factories make, and what ints become
        if self.depends_on is not None:
            key.append(self.depends_on())
        signature = tuple(key)
        entry = self.entries.get(signature)
        if entry is None:
            entry = self._new_signature(args, kwargs or {}, arrays)
            self.entries[signature] = entry
        elif self.number_check is not None:
            check_values(self.func, self.number_check, self._bind(args, kwargs or {}))
        if entry.draws:
            arrays.extend(active.environment._random_arguments(generator))
        return entry, arrays

    def _scan(self, a: Any, kind: str, key: list[Any], arrays: list[Any]) -> None:
        cls = a.__class__
        if cls is Tensor:
            key.append(a._aval)
            arrays.append(a._store.array)
        elif cls is View:
            _scan_view(a, key, arrays)
        elif a is None:
            key.append(None)
        elif kind is STATIC:
            # 1, 1.0 and True are equal as keys, and 0.0 and -0.0; NaN is not even equal to itself
            key.append(tuple(a) if cls is list else repr(a) if cls is float or cls is complex else a)
            if cls is bool:
                key.append(cls)
        elif kind is TENSORS or cls is list or cls is tuple:
            key.append(len(a))
            for item in a:
                self._scan(item, TENSOR if kind is TENSORS else kind, key, arrays)
        elif cls is float or cls is int or cls is bool or cls is complex:
            key.append(cls)
            arrays.append(scalar_array(a))
        elif isinstance(a, torch.Tensor):
            self._scan_foreign(a, key, arrays)
        elif kind is GENERATOR:
            key.append("generator")
        else:
            symbol = array_of_symbol(a)
            key.append(("symbol", symbol.dtype))
            arrays.append(symbol)

    def _scan_foreign(self, a: torch.Tensor, key: list[Any], arrays: list[Any]) -> None:
        """A tensor that is not ours among the arguments: as on cuda, a 0-d CPU tensor and CPU indices are welcome."""
        if isinstance(a, Tensor):  # a subclass of ours
            key.append(a._aval)
            arrays.append(a._array())
            return
        if not (a.device.type == "cpu" and (a.dim() == 0 or self.takes_cpu(a))):
            raise _WrongDevice(a)
        key.append(Aval.contiguous(tuple(a.shape), a.dtype))
        if a.dim() and self.takes_sizes:
            key.append(tuple(a.tolist()))  # static, and few
        arrays.append(array_from_torch(a))

    def _device_error(self, tensor: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> RuntimeError:
        """torch's wording, naming the op and the argument."""
        name = next(
            argument.name
            for argument, _, value in self._bind(args, kwargs)
            if value is tensor or (isinstance(value, (list, tuple)) and any(item is tensor for item in value))
        )
        if tensor.device.type == DEVICE_TYPE:
            return ForeignTensorError(
                f"{self.name}: `{name}` is a {type(tensor).__name__}, which does not mix with plain tensors on device 'jax'. "
                "Make all of them the one or the other."
            )
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, jax:0 and "
            f"{tensor.device}! (when checking argument for argument {name} in {self.name}). Move it with `.to('jax')`."
        )

    def takes_cpu(self, a: torch.Tensor) -> bool:
        """Whether a CPU tensor is welcome, as on cuda: indices, and lengths of sequences."""
        return self.func_indexes or (
            (self.takes_sizes or self.takes_lengths) and not (a.is_floating_point() or a.is_complex())
        )

    # -- a new signature -------------------------------------------------------------------------

    def _new_signature(self, args: Sequence[Any], kwargs: dict[str, Any], arrays: list[Any]) -> _Entry:
        log.new_signature(self.name, args, kwargs)
        counter = iter(range(len(arrays)))
        bound: dict[str, Any] = {}
        metas: dict[str, Any] = {}
        for argument, kind, a in self._bind(args, kwargs):
            bound[argument.name] = template_of(a, kind, counter)
            # lengths stay real: torch's composites read them
            real = argument.name == "batch_sizes" and isinstance(a, torch.Tensor) and not isinstance(a, Tensor)
            metas[argument.name] = a if real else meta_of(a)
        avals = self._result_avals(metas, kwargs)
        if self.definition.value_check is not None:
            check_values(self.func, self.definition.value_check, self._bind(args, kwargs))
        draws, call = self._drawing(bound, metas, arrays)
        if avals is None:
            call = self._rounded(call, metas)
        body = self._guarded(call, avals)
        if avals is None:
            traced = [*arrays, jax.random.key(0), np.uint32(0)] if draws else arrays
            avals = self._avals_by_tracing(body, traced, metas)
            body = self._guarded(call, avals)
        tensors = [m.dtype for m in leaves_of(list(metas.values())) if isinstance(m, torch.Tensor)]
        results = [a.dtype for a in _flat_avals(avals) if a is not None]
        wide = draws or not tensors or any(d in _WIDE for d in tensors + results)
        return _Entry(body, avals, _structure(self.schema), draws, wide, TENSORS in self.kinds)

    def _drawing(
        self, bound: dict[str, Any], metas: dict[str, Any], arrays: list[Any]
    ) -> tuple[bool, Callable[..., Any]]:
        """Whether this call draws random numbers, and the body's call. A body whose key is optional (dropout_p = 0) is tried
        without one; what jax has traced of it then, it takes again when the call is run."""
        if self.key_name is None:
            return False, self._body_call(bound, metas, False)
        if self.definition.parameters[self.key_name].default is inspect.Parameter.empty:
            return True, self._body_call(bound, metas, True)
        keyless = self._body_call(bound, metas, False)

        def call(*arrays: jax.Array) -> Any:
            results = keyless(arrays)
            if results is NotImplemented:
                raise Declined
            return results

        traced = jax.jit(call, inline=True)
        try:
            with jax.enable_x64(True):
                jax.eval_shape(traced, *arrays)
        except Declined:
            return False, keyless
        except Exception:  # it missed its key, or the call is wrong, which the real run will say
            return True, self._body_call(bound, metas, True)
        return False, lambda arrays: traced(*arrays)

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, str, Any]]:
        pairs = list(zip(self.arguments, self.kinds, args, strict=False))
        by_name = {a.name: a for a in self.arguments}
        pairs += [(by_name[name], self.kinds_by_name[name], value) for name, value in kwargs.items()]
        return pairs

    def _result_avals(self, metas: dict[str, Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """Run the op on meta tensors: torch's checks and errors, and the avals of the results. None without a meta kernel."""
        quick = self._pointwise_aval(metas)
        if quick is not None:
            return [quick]
        outs = run_on_meta(self.func, self.arguments, metas)
        if outs is NO_META:
            return None
        avals = avals_of(outs, len(self.schema.returns))
        strides = self.definition.strides
        if strides is not None:
            avals[0] = Aval.of(avals[0].shape, strides(avals[0].shape, metas), avals[0].dtype)
        like = [metas[n] for n in self.definition.format_of if isinstance(metas.get(n), torch.Tensor)]
        return [_in_format_of(aval, like) for aval in avals] if like else avals

    def _pointwise_aval(self, metas: dict[str, Any]) -> Aval | None:
        """The result of a pointwise op where there is nothing to check: contiguous floating operands, one of them as large
        as the result. torch's meta kernels for these are Python, and the first of them imports all of torch._dynamo."""
        promote = self.definition.promote
        if (
            torch.Tag.pointwise not in self.func.tags
            or promote.kind is None
            or promote.arguments
            or self.schema.name.partition("::")[2] in _INTEGERS_ONLY
            or len(self.schema.returns) != 1
        ):
            return None
        tensors = [m for n, m in metas.items() if isinstance(m, torch.Tensor)]
        if len({t.dtype for t in tensors}) != 1 or any(
            t.dtype not in _PLAIN_FLOATS or t.stride() != contiguous_stride(tuple(t.shape)) for t in tensors
        ):
            return None
        largest = max((tuple(t.shape) for t in tensors), key=lambda shape: (len(shape), math.prod(shape)))
        for t in tensors:
            if any(n not in (1, m) for n, m in zip(reversed(t.shape), reversed(largest), strict=False)):
                return None  # it does not broadcast, or to something larger still
        if any(isinstance(v, (list, tuple)) or isinstance(v, complex) for v in metas.values()):
            return None
        _, dtype = elementwise_dtypes(*self._promoting(metas, tuple(metas)), type_promotion_kind=promote.kind)
        return Aval.contiguous(largest, dtype)

    def _avals_by_tracing(self, body: Callable[..., Any], arrays: list[Any], metas: dict[str, Any]) -> list[Any]:
        shapes = iter(jax.eval_shape(body, *arrays))
        groups: list[Any] = []
        returns = (self.variant.twin._schema if self.variant is not None else self.schema).returns
        for counted in body.counts(*arrays):  # type: ignore[attr-defined]
            some = [next(shapes) for _ in range(counted)]
            avals = [None if s is None else Aval.contiguous(s.shape, torch_dtype(s.dtype)) for s in some]
            groups.append(avals if str(returns[len(groups)].type).startswith("List") else avals[0])
        return groups

    def _accepted_names(self) -> frozenset[str]:
        definition = self.definition
        names = [a.name for a in self.arguments if not a.is_out]
        if definition.kind == "decomposition":
            return frozenset(names)  # called with the op's own arguments, positionally: its names are its own affair
        if definition.positional:
            return frozenset(n for n in names if n not in LEFT_OUT)
        twin = self.variant.twin if self.variant is not None else self.func
        check_parameters(definition, twin._schema)
        parameters = definition.parameters
        if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
            return frozenset(names)
        return frozenset(n for n in parameters if n != self.key_name)

    def _body_call(self, bound: dict[str, Any], metas: dict[str, Any], draws: bool) -> Callable[..., Any]:
        """The definition's body as a function of the call's arrays: static values put in, promotion applied.

        With `draws`, the last two arrays are a random key and a count to fold into it.
        """
        definition = self.definition
        template = {n: v for n, v in bound.items() if n in self.accepted}
        for argument in self.arguments:
            # a schema default that the body does not repeat (or one without default in the body) is passed on
            if argument.name not in bound and argument.name in self.accepted and not argument.is_out:
                parameter = definition.parameters.get(argument.name)
                if parameter is not None and parameter.default is parameter.empty and not definition.positional:
                    template[argument.name] = template_of(argument.default_value, STATIC, iter(()))
        template = self._promoted(template, metas)
        key_name = self.key_name if draws else None
        body = definition.body

        if definition.positional:
            values = tuple(template.values())
            return lambda arrays: body(*fill(values, arrays))
        if definition.kind == "decomposition":
            return self._decomposition_call(template, metas)

        def call(arrays: Sequence[jax.Array]) -> Any:
            extra = {key_name: jax.random.fold_in(arrays[-2], arrays[-1])} if key_name else {}
            return body(**{name: fill(value, arrays) for name, value in template.items()}, **extra)

        return call

    def _decomposition_call(self, template: dict[str, Any], metas: dict[str, Any]) -> Callable[..., Any]:
        body = self.definition.body
        names = [a.name for a in self.arguments if not a.kwarg_only]

        def call(arrays: Sequence[jax.Array]) -> Any:
            if _decomposing.names.count(self.name) > _DEEPEST:
                raise self._circle()
            outer = _decomposing.names
            _decomposing.names = (*outer, self.name)
            try:
                return run(arrays)
            except RecursionError:  # the very signature that is being traced
                raise self._circle() from None
            finally:
                _decomposing.names = outer

        def run(arrays: Sequence[jax.Array]) -> Any:
            filled = {n: _as_tensors(fill(v, arrays), metas.get(n)) for n, v in template.items()}
            positional = []
            for name in names:
                if name not in filled:
                    break
                positional.append(filled.pop(name))
            return arrays_of(body(*positional, **filled))

        return call

    def _circle(self) -> OperatorNotFound:
        """What to raise where torch's decompositions of an op lead back to it."""
        said = active.environment._table.not_found_message(self.func)  # type: ignore[union-attr]
        chain = " -> ".join(_decomposing.names[-4:])
        return OperatorNotFound(f"{said}\nTorch's own decompositions of it go round in circles ({chain}).")

    def _promoted(self, template: dict[str, Any], metas: dict[str, Any]) -> dict[str, Any]:
        promote = self.definition.promote
        kinds = self.kinds_by_name
        if self.definition.kind == "decomposition":
            return template
        taking = promote.arguments or tuple(n for n in template if kinds[n] in (TENSOR, TENSORS, SCALAR, STATIC))
        if promote.kind is not None:
            compute, _ = elementwise_dtypes(*self._promoting(metas, taking), type_promotion_kind=promote.kind)
            dtype = jax_dtype(compute)
            return {n: cast(v, dtype) if n in taking and kinds[n] is not STATIC else v for n, v in template.items()}
        # without promotion the tensors stay as they are, and scalars come in the type the tensors compute in
        tensors = [m.dtype for m in leaves_of(list(metas.values())) if isinstance(m, torch.Tensor)]
        return {
            n: cast(v, own) if kinds[n] is SCALAR and (own := scalar_dtype(tensors, metas.get(n))) else v
            for n, v in template.items()
        }

    def _rounded(self, call: Callable[..., Any], metas: dict[str, Any]) -> Callable[..., Any]:
        """`call` with the results that come in the type it computes in, in the one that the promotion rule promises: for ops
        without a meta kernel to say so."""
        promote = self.definition.promote
        if promote.kind is None or self.definition.kind == "decomposition":
            return call
        taking = promote.arguments or tuple(metas)
        types = elementwise_dtypes(*self._promoting(metas, taking), type_promotion_kind=promote.kind)
        compute, promised = map(jax_dtype, types)
        if compute == promised:
            return call

        def rounded(arrays: Sequence[jax.Array]) -> Any:
            results = call(arrays)
            if results is NotImplemented:
                return results
            return jax.tree.map(lambda r: r.astype(promised) if r.dtype == compute else r, results)

        return rounded

    def _promoting(self, metas: dict[str, Any], taking: tuple[str, ...]) -> list[Any]:
        """The tensors and numbers among the arguments `taking` that decide the common dtype."""
        kinds = self.kinds_by_name
        parts = leaves_of([metas[n] for n in taking if n in metas and kinds[n] in (TENSOR, TENSORS)])
        if self.definition.promote.arguments or not parts:
            scalars = [metas[n] for n in taking if n in metas and kinds[n] is SCALAR]
        else:
            # a schema Scalar (alpha, value) never lifts the tensors' dtype, except where it stands for an operand
            scalars = [s for _, s in operands_of(self.arguments, metas, taking, kinds)]
        return parts + [s for s in scalars if s is not None]

    def _guarded(self, call: Callable[..., Any], avals: list[Any] | None) -> Callable[..., Any]:
        """`call` with its results checked against torch's, cast to torch's dtypes, and never one of its inputs."""
        scope = self.name.partition("::")[2]
        definition = self.definition
        flat_avals = None if avals is None else _flat_avals(avals)

        def body(*arrays: jax.Array) -> Any:
            with jax.enable_x64(True), jax.named_scope(scope):
                try:
                    results = call(arrays)
                    if results is NotImplemented:
                        raise Declined
                    results = _flat_results(results)
                except Declined:
                    raise
                except Exception as error:
                    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays if hasattr(a, "dtype"))
                    error.add_note(f"while running {self.name}, defined by {definition.origin}, on ({shapes})")
                    raise
                if flat_avals is not None:
                    results = self._checked(results, flat_avals)
                if self.lies_like_self and flat_avals is not None:
                    results = [alike(results[0], arrays[0]), *results[1:]]
                results = [jnp.copy(r) if any(r is a for a in arrays) else r for r in results]
            if avals is not None and len(avals) == 1 and isinstance(avals[0], Aval):
                return results[0]
            return tuple(results)

        if avals is None:
            several = len((self.variant.twin._schema if self.variant is not None else self.schema).returns) > 1

            def counts(*arrays: jax.Array) -> list[int]:
                """How many arrays each result of the op is."""
                found: list[int] = []

                def probe(*tracers: jax.Array) -> Any:
                    with jax.enable_x64(True):
                        results = call(tracers)
                    found[:] = [len(_flat_results(r)) for r in (results if several else [results])]
                    return _flat_results(results)

                jax.eval_shape(probe, *arrays)
                return found

            body.counts = counts  # type: ignore[attr-defined]
        body.__name__ = scope  # the program's name in profiles
        return body

    def _checked(self, results: list[Any], avals: list[Aval | None]) -> list[Any]:
        if len(results) == len(avals):
            results = [r for r, aval in zip(results, avals, strict=True) if aval is not None]
        else:
            results = [r for r in results if r is not None]
        wanted = [aval for aval in avals if aval is not None]
        got = [jnp.asarray(r) for r in results if r is not None]
        if len(got) != len(wanted) or any(g.shape != w.shape for g, w in zip(got, wanted, strict=True)):
            raise LoweringMismatchError(
                f"{self.name}: torch's meta kernel says {wanted}, but the {self.definition.kind} by {self.definition.origin} "
                f"returned {[f'{g.dtype}{list(g.shape)}' for g in got]}. The definition is at fault; override it with "
                f"env.override_op_definition({self.definition.op!r}, ...) or report it to the pack."
            )
        return [to_dtype(g, w.jax_dtype) for g, w in zip(got, wanted, strict=True)]


class _ViewEntry:
    """One signature of one view op: its arguments for the path, and the aval and offset of each view.

    wrapper: what the (only) view is made from.
    chain:   the path of the base it was last made of, and its own; one object, as threads share it.
    """

    __slots__ = ("avals", "chain", "static", "traced", "wrapper")

    def __init__(self, static: tuple[Any, ...], traced: tuple[int, ...], avals: list[tuple[Aval, int]]) -> None:
        self.static = static
        self.traced = traced
        self.avals = avals
        self.wrapper = view_wrapper(*avals[0]) if avals else ()
        self.chain: tuple[Any, Any] = (None, None)


class ViewKernel:
    """Runs a view op: gives a View over the same storage. Computes nothing but, once per signature, its geometry."""

    def __init__(self, func: Any, definition: ViewDefinition) -> None:
        self.func = func
        self.name = op_name(func)
        self.definition = definition
        self.rules = definition.rules
        self.schema = func._schema
        self.entries: dict[Any, _ViewEntry] = {}
        self.many = str(self.schema.returns[0].type).startswith("List")

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        base = args[0]
        if base.__class__ is View:
            path, offsets, offset = base._path, base._offsets, base.storage_offset()
        else:
            path, offsets, offset = ROOT, (), 0
        key = [base._aval, offset]
        for a in args[1:]:
            key.append(tuple(a) if a.__class__ is list else a)
        if kwargs:
            key.extend(kwargs.items())
        signature = tuple(key)
        entry = self.entries.get(signature)
        if entry is None:
            entry = self._new_signature(base, offset, args[1:], kwargs or {})
            if len(self.entries) > 20_000:  # a loop over every index of something long
                self.entries.clear()
            self.entries[signature] = entry
        store = base._store
        if self.many:
            return [
                make_view(
                    store, aval, at, path.child(self.rules, entry.static, len(entry.traced), i), offsets + entry.traced
                )
                for i, (aval, at) in enumerate(entry.avals)
            ]
        chain = entry.chain
        if chain[0] is not path:
            chain = entry.chain = (path, path.child(self.rules, entry.static, len(entry.traced)))
        view = make_wrapper(*entry.wrapper)
        view._store = store
        view._aval = entry.avals[0][0]
        view._path = chain[1]
        view._offsets = offsets + entry.traced if offsets else entry.traced
        return view

    def _new_signature(self, base: Any, offset: int, args: Sequence[Any], kwargs: dict[str, Any]) -> _ViewEntry:
        aval = base._aval
        meta = torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype, device="meta")
        if offset:
            meta = meta.as_strided(aval.shape, aval.stride, offset)
        with torch.no_grad():
            out = self.func(meta, *args, **kwargs)
        values = list(args) + [None] * (len(self.schema.arguments) - 1 - len(args))
        for i, argument in enumerate(self.schema.arguments[1:]):
            if i >= len(args):
                values[i] = kwargs.get(argument.name, argument.default_value)
        if self.rules.split is not None:
            static, traced = self.rules.split(aval.shape, *values)
        else:
            static, traced = tuple(hashable(jax_value(v)) for v in values), ()
        outs = out if self.many else [out]
        return _ViewEntry(static, traced, [(aval_of_meta(x), x.storage_offset()) for x in outs])


class DataDependentKernel(LoweringKernel):
    """Runs an op whose result's shape, or Python value, depends on the data: eagerly, on concrete arrays."""

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        bound = {
            argument.name: concrete_template(a, kind, self._concrete)
            for argument, kind, a in self._bind(args, kwargs or {})
            if argument.name in self.accepted
        }
        with jax.enable_x64(True), jax.ensure_compile_time_eval():  # of constants in a trace, too
            out = self.definition.body(**bound)
        strides = self.definition.strides
        if strides is not None:
            return make_tensor(out, Aval.of(out.shape, strides(out.shape, {}), torch_dtype(out.dtype)))
        return _wrap_concrete(out)

    def _concrete(self, tensor: torch.Tensor) -> jax.Array:
        array = tensor._array() if isinstance(tensor, Tensor) else array_from_torch(tensor)
        if is_traced(array):
            raise DataDependentError(
                f"{self.name}: the shape of its result depends on the values of its input ({array.aval}), which inside a "
                f"jitted function are known only when the program runs. Instead: {self.definition.data_dependent}; or "
                "leave this line out of the jitted function."
            )
        return array


class CaseKernel(LoweringKernel):
    """A lowering some of whose calls depend on data, and run as such (see DataDependentCase)."""

    def __init__(self, func: Any, definition: Definition) -> None:
        super().__init__(func, definition)
        case = definition.case
        assert case is not None
        self.when = case.when
        self.exception = DataDependentKernel(
            func, dataclasses.replace(definition, body=case.body, data_dependent=case.instead, case=None)
        )

    def run(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        # a form's calls are of signatures that came by here and were no exception
        if self.when(*args, **(kwargs or {})):
            return self.exception(args, kwargs)
        return super().run(args, kwargs)


class DirectKernel:
    """Runs an op by a Python function of torch tensors, called afresh each time (it is not compiled as a whole)."""

    def __init__(self, func: Any, run: Callable[..., Any], definition: Definition | None = None) -> None:
        self.func = func
        self.name = op_name(func)
        self.run = run
        self.definition = definition

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        return self.run(*args, **(kwargs or {}))


class MakingKernel(LoweringKernel):
    """Runs an op that makes a tensor by the example of another (zeros_like, new_full), on the device that the call names."""

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type != DEVICE_TYPE:
                return self.func(*_elsewhere(args, device), **kwargs)
        return super().__call__(args, kwargs)


def _elsewhere(args: Sequence[Any], device: Any) -> list[Any]:
    """The arguments on that device: of the example, which comes first, only what it is, not its values."""
    example = args[0]
    like = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=device)
    return [like, *(a.to(device) if isinstance(a, torch.Tensor) else a for a in args[1:])]


def lowering_kernel(func: Any, definition: Definition) -> LoweringKernel:
    """The kernel of an op that is run by a function of arrays to arrays."""
    base = func._schema.name.partition("::")[2]
    by_example = base.endswith("_like") or base.startswith("new_")
    if by_example and any(a.name == "device" for a in func._schema.arguments):
        return MakingKernel(func, definition)
    return LoweringKernel(func, definition)


def wrap_results(results: Any, avals: list[Any]) -> list[Any]:
    """The arrays `results` as Tensors of these avals, in the lists and with the Nones that those say."""
    out: list[Any] = []
    at = 0
    for aval in avals:
        if aval is None:
            out.append(None)
        elif isinstance(aval, list):
            out.append([make_tensor(results[at + i], x) for i, x in enumerate(aval)])
            at += len(aval)
        else:
            out.append(make_tensor(results[at], aval))
            at += 1
    return out


def _in_format_of(aval: Any, like: list[torch.Tensor]) -> Any:
    """`aval`, channels_last if one of `like` is. CPU torch keeps channels_last_3d in bfloat16 only, and so it is let go."""
    format = torch.channels_last
    for tensor in like:
        if isinstance(aval, Aval) and len(aval.shape) == 4 and suggest_memory_format(tensor) is format:
            return aval_of_meta(torch.empty(aval.shape, dtype=aval.dtype, device="meta", memory_format=format))
    return aval


def _lies_like_self(func: Any) -> bool:
    """Whether the first result has the size of the first argument and nothing of its values: zeros_like, fill_, normal_."""
    name = func._schema.name.partition("::")[2]
    fills = name.endswith("_") and torch.Tag.nondeterministic_seeded in func.tags
    return fills or name.endswith("_like") or name in ("copy_", "fill_", "zero_")


def _flat_avals(avals: list[Any]) -> list[Aval | None]:
    flat: list[Aval | None] = []
    for aval in avals:
        flat.extend(aval) if isinstance(aval, list) else flat.append(aval)
    return flat


# -- results -------------------------------------------------------------------------------------


def _flat_results(results: Any) -> list[Any]:
    if isinstance(results, (list, tuple)):
        flat: list[Any] = []
        for r in results:
            flat.extend(_flat_results(r)) if isinstance(r, (list, tuple)) else flat.append(r)
        return flat
    return [results]


def _structure(schema: Any) -> Callable[[list[Any]], Any]:
    if len(schema.returns) == 0:
        return lambda results: None
    if len(schema.returns) == 1:
        return lambda results: results[0]
    return tuple


def arrays_of(value: Any) -> Any:
    """`value` with every Tensor of ours replaced by its array; CPU tensors are copied."""
    if isinstance(value, Tensor):
        return value._array()
    if isinstance(value, torch.Tensor):
        return array_from_torch(value)
    if isinstance(value, (list, tuple)):
        return [arrays_of(v) for v in value]
    return value


def _as_tensors(value: Any, meta: Any) -> Any:
    """Arrays as Tensors with the strides of their metas, and numpy dtypes as torch's, for torch code."""
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        if isinstance(meta, torch.Tensor):
            return make_tensor(value, Aval.of(tuple(meta.shape), tuple(meta.stride()), meta.dtype))
        return make_tensor(value, Aval.contiguous(value.shape, torch_dtype(value.dtype)))
    if isinstance(value, np.dtype):
        return torch_dtype(value)
    if isinstance(value, list):
        metas = meta if isinstance(meta, (list, tuple)) and len(meta) == len(value) else [None] * len(value)
        return [_as_tensors(v, m) for v, m in zip(value, metas, strict=True)]
    if isinstance(value, tuple):
        return [_as_tensors(v, None) for v in value]
    return value


def _wrap_concrete(out: Any) -> Any:
    if isinstance(out, (jax.Array, np.ndarray)):
        array = out if isinstance(out, jax.Array) else jnp.asarray(out)
        return make_tensor(array, Aval.contiguous(array.shape, torch_dtype(array.dtype)))
    if isinstance(out, (list, tuple)):
        return type(out)(_wrap_concrete(o) for o in out)
    return out
