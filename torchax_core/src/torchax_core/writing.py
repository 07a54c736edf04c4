"""WritingKernel: in-place and out= ops, run through their functional twins (see variants.py)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchax_core.convert import is_traced
from torchax_core.dtypes import jax_dtype, type_name
from torchax_core.errors import LoweringMismatchError
from torchax_core.kernel import FORMS, LoweringKernel, wrap_results
from torchax_core.meta import NO_META, aval_of_meta, avals_of, check_out_dtypes, run_on_meta
from torchax_core.opset import Definition
from torchax_core.overlap import check_elements_apart, check_shared_memory
from torchax_core.templates import STATIC, leaves_of
from torchax_core.tensor import Aval, Tensor, active, become, make_tensor
from torchax_core.variants import Variant
from torchax_core.view import View

__all__ = ["WritingKernel", "become_resized"]


class WritingKernel(LoweringKernel):
    """Runs an in-place or out= op through its functional twin, and writes the results into the arguments."""

    def __init__(self, func: Any, definition: Definition, variant: Variant) -> None:
        super().__init__(func, definition, variant)
        # add_, copy_, ...: one tensor is written, and returned
        self.in_place = variant.written == ("self",) == variant.returns and str(self.arguments[0].type) == "Tensor"
        self.positions = {a.name: i for i, a in enumerate(self.arguments)}
        self.sharing: set[Any] = set()  # of calls that write to memory another argument reads, those that torch allows
        # an out= form computes in the dtype of its out where the twin takes a dtype and the call gives none: arange, sum
        twin_names = {a.name for a in variant.twin._schema.arguments}
        self.takes_dtype_of_out = bool(variant.outs) and "dtype" in twin_names & definition.parameters.keys()
        if self.takes_dtype_of_out:
            self.kinds_by_name.setdefault("dtype", STATIC)
            self.accepted |= {"dtype"}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """A call whose form or signature is new, or that has no form of its own."""
        if self.in_place:
            target = args[0]
            if not isinstance(target, Tensor):
                raise self._device_error(target, args, kwargs or {})
            check_shared_memory(self.func, args, kwargs or {}, [target], self.sharing)
            if target.__class__ is View:
                if active.trace is not None:
                    return self._write_traced(target, args, kwargs)
                return self._write_through(target, args, kwargs)
            entry, arrays = self._enter(args, kwargs)
            target._store.write(entry.run(*arrays))
            if target.__class__ is Tensor and entry.formless < FORMS:
                self._remember(args, kwargs, entry, "write", entry)
            return target
        variant = self.variant
        assert variant is not None
        if variant.outs:
            outs = leaves_of([self._argument(name, args, kwargs) for name in variant.outs])
            check_shared_memory(self.func, args, kwargs or {}, outs, self.sharing)
        entry, arrays = self._enter(args, kwargs)
        results = entry.run(*arrays)
        if entry.single is not None:
            results = (results,)
        del arrays  # they would keep the old values alive while the new ones are written
        fresh = wrap_results(results, entry.avals[: variant.fresh])
        at = sum(len(a) if isinstance(a, list) else a is not None for a in entry.avals[: variant.fresh])
        for name, aval in zip(variant.written, entry.avals[variant.fresh :], strict=True):
            target = self._argument(name, args, kwargs)
            pairs = zip(target, aval, strict=True) if isinstance(aval, list) else ((target, aval),)
            for tensor, one in pairs:
                if one is None:
                    continue
                if name in variant.outs and tensor._aval is not one and tensor._aval.shape != one.shape:
                    if self.definition.fills_out and tensor._aval.numel == one.numel:
                        tensor._write(results[at].reshape(tensor._aval.shape))
                    else:
                        become_resized(tensor, make_tensor(results[at], one))
                else:
                    tensor._write(results[at])
                at += 1
        return self._returned(fresh, args, kwargs)

    def _write_through(self, view: View, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """In place on a view: read, computed and written back to the base in one program, which takes the base over."""
        view._cache = None  # so that the base is given, and not what was read of it
        entry, arrays = self._enter(args, kwargs)
        pair = entry.made.get(view._path)
        if pair is None:
            path, count = view._path, len(view._offsets)

            def run(*arrays: jax.Array) -> jax.Array:
                return path.write_inline(arrays[0], entry.body(*arrays), arrays[1 : 1 + count])

            run.__name__ = entry.body.__name__
            pair = entry.made[view._path] = (entry.compiled(run), entry.compiled(run, donate_argnums=(0,)))
        store = view._store
        # the storage, the list of arrays, getrefcount's argument: one more, and somebody relies on the base as it is
        donate = sys.getrefcount(arrays[0]) <= 3 and not any(is_traced(a) for a in arrays)
        store.write(pair[donate](*arrays))
        if entry.formless < FORMS:
            self._remember(args, kwargs, entry, "through", pair)
        return view

    def _write_traced(self, view: View, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """In place on a view, inside a program: read, computed and written back, at offsets that are constants of it."""
        view._array()
        entry, arrays = self._enter(args, kwargs)
        view._write(entry.run(*arrays))
        return view

    def _argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        if kwargs and name in kwargs:
            return kwargs[name]
        at = self.positions[name]
        return args[at] if at < len(args) else None

    def _returned(self, fresh: list[Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        returns = self.variant.returns  # type: ignore[union-attr]
        if not returns:
            return None
        left = iter(fresh)
        out = [next(left) if name is None else self._argument(name, args, kwargs) for name in returns]
        return out[0] if len(out) == 1 else tuple(out)

    def _result_avals(self, metas: dict[str, Any], kwargs: dict[str, Any]) -> list[Any] | None:
        variant = self.variant
        assert variant is not None
        for name in variant.written:
            for leaf in leaves_of([metas.get(name)]):
                check_elements_apart(leaf.shape, leaf.stride())
        resized = self._check_outs(metas) if variant.outs else {}
        before = {n: _shapes(metas.get(n)) for n in variant.written}
        outs = run_on_meta(self.func, self.arguments, metas)
        if outs is NO_META:
            metas.update(resized)
        fresh: list[Any] = []
        if outs is not NO_META and variant.fresh:
            results = outs if isinstance(outs, (tuple, list)) else (outs,)
            kept = [r for r, name in zip(results, variant.returns, strict=True) if name is None]
            fresh = avals_of(kept if len(kept) != 1 else kept[0], len(kept))
        elif outs is NO_META or (not variant.outs and self._narrow_target(metas)):
            twin_names = {a.name for a in variant.twin._schema.arguments}
            again = run_on_meta(
                variant.twin, variant.twin._schema.arguments, {n: v for n, v in metas.items() if n in twin_names}
            )
            if again is NO_META:
                if variant.fresh or variant.outs:
                    return None
            else:
                # torch's own meta of a decomposed in-place op may let a float result into an int target (an out= form has
                # rules of its own: `sum` computes in the dtype of its out)
                values = again if len(variant.twin._schema.returns) > 1 else (again,)
                fresh = [aval_of_meta(value) for value in values[: variant.fresh]]
                self._check_castable(values[variant.fresh :], metas)
        written = []
        for name in variant.written:
            if name not in variant.outs and before[name] != _shapes(metas.get(name)):
                raise LoweringMismatchError(f"{self.name} changed the shape of `{name}`, which an in-place op cannot.")
            written.append(aval_of_meta(metas.get(name)))
        return [*fresh, *written]

    def _avals_by_tracing(self, body: Callable[..., Any], arrays: list[Any], metas: dict[str, Any]) -> list[Any]:
        """What is written keeps its dtype, and its strides if its shape stays."""
        variant = self.variant
        assert variant is not None
        avals = super()._avals_by_tracing(body, arrays, metas)
        for at, name in enumerate(variant.written, variant.fresh):
            target, aval = metas.get(name), avals[at]
            if isinstance(target, torch.Tensor) and isinstance(aval, Aval):
                self._check_castable_to(aval.dtype, target.dtype)
                same = tuple(target.shape) == aval.shape
                avals[at] = aval_of_meta(target) if same else Aval.contiguous(aval.shape, target.dtype)
        return avals

    def _narrow_target(self, metas: dict[str, Any]) -> bool:
        """Whether a written argument has a dtype that a float result cannot be cast to."""
        targets = [metas.get(name) for name in self.variant.written]  # type: ignore[union-attr]
        return any(isinstance(t, torch.Tensor) and not (t.is_floating_point() or t.is_complex()) for t in targets)

    def _check_outs(self, metas: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Raise what torch raises for `out=` tensors of these dtypes. Those of other shapes than the results become empty
        metas, so that torch does not warn of resizing them: `become_resized` will. Returns what they are resized to."""
        variant = self.variant
        assert variant is not None
        outs = [n for n in variant.written if n in variant.outs]
        if not all(isinstance(metas.get(n), torch.Tensor) for n in outs):
            return {}
        arguments = variant.twin._schema.arguments
        names = {a.name for a in arguments}
        values = run_on_meta(variant.twin, arguments, {n: v for n, v in metas.items() if n in names})
        if values is NO_META:
            return {}
        results = (values if len(variant.twin._schema.returns) > 1 else (values,))[variant.fresh :]
        dtypes: dict[str, torch.dtype] = {}
        resized: dict[str, torch.Tensor] = {}
        for name, result in zip(outs, results, strict=False):
            if isinstance(result, torch.Tensor):
                dtypes[name] = result.dtype
                if result.shape != metas[name].shape:
                    resized[name] = torch.empty(result.shape, dtype=metas[name].dtype, device="meta")
                    metas[name] = torch.empty(0, dtype=metas[name].dtype, device="meta")
        check_out_dtypes(self.func, self.arguments, metas, dtypes)
        return resized

    def _check_castable(self, values: Sequence[Any], metas: dict[str, Any]) -> None:
        for name, value in zip(self.variant.written, values, strict=True):  # type: ignore[union-attr]
            target = metas.get(name)
            if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
                self._check_castable_to(value.dtype, target.dtype)

    @staticmethod
    def _check_castable_to(result: torch.dtype, target: torch.dtype) -> None:
        if not torch.can_cast(result, target):
            raise RuntimeError(
                f"result type {type_name(result)} can't be cast to the desired output type {type_name(target)}"
            )

    def _checked(self, results: list[Any], avals: list[Aval | None]) -> list[Any]:
        # an in-place op whose twin broadcasts (fill_, copy_) may give a smaller result than what it writes to
        if len(results) == len(avals):
            results = [
                jnp.broadcast_to(r, a.shape) if r is not None and a is not None and jnp.ndim(r) == 0 else r
                for r, a in zip(results, avals, strict=True)
            ]
        return super()._checked(results, avals)

    def _body_call(self, bound: dict[str, Any], metas: dict[str, Any], draws: bool) -> Callable[..., Any]:
        variant = self.variant
        assert variant is not None
        twin_names = {a.name for a in variant.twin._schema.arguments}
        kept = {n: v for n, v in bound.items() if n in twin_names}
        if self.takes_dtype_of_out and kept.get("dtype") is None:
            kept["dtype"] = jax_dtype(metas[next(iter(variant.outs))].dtype)
        return super()._body_call(kept, metas, draws)


def become_resized(target: Tensor, source: Tensor) -> None:
    """Put a result of another shape in the place of an `out=` tensor, with torch's warning if that had elements."""
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match "
            f"the required output shape {list(source.shape)}. This behavior is deprecated, and in a future PyTorch release "
            "outputs will not be resized unless they have zero elements. You can explicitly reuse an out tensor t by "
            "resizing it, inplace, to zero elements with t.resize_(0).",
            UserWarning,
            stacklevel=2,
        )
    become(target, source)


def _shapes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_shapes(v) for v in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
