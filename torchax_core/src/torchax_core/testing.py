"""What pack authors test with: inputs, one call compared between CPU torch and device "jax", and the OpInfo sweep.

    a, b = sample((2, 3), torch.float32), sample((3,), torch.float32, seed=1)
    assert_matches_torch(torch.add, a, b, forms=["functional", "inplace", "out"], grad=True)

``torchax conformance --ops 'nn.functional.conv' --dtypes float32``, or ``python -m torchax_core.testing``, runs PyTorch's
own samples of many ops; `Cell`, `cells` and `run_cell` are its parts. See docs/conformance.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["assert_matches_torch", "assert_same_error", "assert_same_result", "moved", "sample"]

_CONFORMANCE = ("Cell", "Options", "Report", "Result", "cells", "known_failures", "run_cell", "sweep")


def __getattr__(name: str) -> Any:
    """What of `torchax_core.conformance` pack authors may use from here; imported when asked for."""
    if name in _CONFORMANCE:
        from torchax_core import conformance

        return getattr(conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


FORMS = ("functional", "inplace", "out")
DEVICE = "jax"


# -- inputs ------------------------------------------------------------------------------------------------------------


def sample(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    low: float | None = None,
    high: float | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """A CPU tensor of numbers drawn evenly from [low, high). The same seed gives the same numbers, so give each
    argument of an op a seed of its own.

    shape:     any, () and sizes of 0 included.
    dtype:     any of torch's: float8 and complex too (both parts are drawn from the range); bools are fair coins.
    low, high: by default -3 and 3 for floats, -9 and 10 for integers, 0 and 10 for unsigned ones.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").to(torch.bool)
    if dtype.is_floating_point or dtype.is_complex:
        low, high = -3.0 if low is None else low, 3.0 if high is None else high
        size = (*shape, 2) if dtype.is_complex else shape
        numbers = torch.rand(size, dtype=torch.float64, generator=generator, device="cpu") * (high - low) + low
        return (torch.view_as_complex(numbers) if dtype.is_complex else numbers).to(dtype)
    unsigned = torch.iinfo(dtype).min == 0
    lowest, highest = (0, 10) if unsigned else (-9, 10)
    low, high = lowest if low is None else low, highest if high is None else high
    return torch.randint(math.ceil(low), math.ceil(high), shape, generator=generator, device="cpu").to(dtype)


def moved(tree: Any, device: str | torch.device) -> Any:
    """A copy of `tree` with all its tensors and modules on `device`, which also replaces torch.devices in it, and
    whatever a dict calls "device".

    Nothing but tensors on "meta" is shared with the original, yet what was one tensor twice in `tree` still is. Leaves stay
    leaves with their requires_grad; strides survive the way to the device (a transposed tensor arrives as a view).
    """
    made: dict[int, Any] = {}

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return value
            if id(value) not in made:
                made[id(value)] = _moved_tensor(value, device)
            return made[id(value)]
        if isinstance(value, torch.nn.Module):
            return copy.deepcopy(value).to(device)
        if isinstance(value, torch.device):
            return torch.device(device)
        if isinstance(value, dict):
            return type(value)((k, device if k == "device" and v is not None else move(v)) for k, v in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(move, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(move, value))
        return value

    return move(tree)


def _moved_tensor(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    source = tensor.detach()
    if source.layout != torch.strided or source.device.type != "cpu" or source.is_contiguous():
        if source.is_conj():
            result = source.conj().to(device, copy=True).conj()
        elif source.is_neg():
            result = torch._neg_view(torch._neg_view(source).to(device, copy=True))
        else:
            result = source.to(device, copy=True)
    elif source.is_conj():
        result = _moved_tensor(source.conj(), device).conj()
    elif source.is_neg():
        result = torch._neg_view(_moved_tensor(torch._neg_view(source), device))
    else:
        outermost_first = sorted(range(source.dim()), key=source.stride, reverse=True)
        dense = source.permute(outermost_first)
        if dense.is_contiguous():
            back = [outermost_first.index(dim) for dim in range(source.dim())]
            result = dense.to(device, copy=True).permute(back)
        else:
            reach = 1 + sum((size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True))
            flat = source.as_strided((reach,), (1,), source.storage_offset())
            result = flat.to(device, copy=True).as_strided(source.shape, source.stride(), 0)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad) if tensor.requires_grad else result


# -- comparing ---------------------------------------------------------------------------------------------------------


def assert_matches_torch(
    fn: Callable[..., Any],
    *args: Any,
    forms: Iterable[str] = ("functional",),
    grad: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> None:
    """Call `fn` with CPU tensors and with copies of them on device "jax"; raise AssertionError where the two differ.

    Compared are the structure of the result, shapes, dtypes, values (integers and bools exactly, floats to
    torch.testing's tolerance of their dtype: float32 1.3e-6, float64 1e-7, unless `rtol`, `atol` are given), and that
    the arguments afterwards hold what CPU's hold.

    fn:     a torch function or method, or any function of tensors.
    args, kwargs: as `fn` takes them, on CPU; tensors may be nested in lists, tuples and dicts. They are not changed.
            An op's own arguments called `rtol`, `atol` or `grad` must be given by position.
    forms:  "functional"; "inplace": the method `fn.__name__ + "_"` on the first tensor, alone and as a view of a larger
            one, which must return the very tensor and write to its base; "out": `out=` given the right shape and given
            size 0, which must return it. A form that raises on CPU must raise the same and change nothing.
    grad:   also compare the gradients of all floating inputs, for random gradients of the outputs.
    """
    __tracebackhide__ = True
    forms = (forms,) if isinstance(forms, str) else tuple(forms)
    unknown = set(forms) - set(FORMS)
    if unknown:
        raise ValueError(f"assert_matches_torch: `forms` may hold {FORMS}, but has {sorted(unknown)}.")
    call = _Call(fn, args, kwargs, rtol, atol)
    if "functional" in forms:
        call.compare_functional()
    if "inplace" in forms:
        call.compare_inplace()
    if "out" in forms:
        call.compare_out()
    if grad:
        call.compare_gradients()


def assert_same_error(fn: Callable[..., Any], *args: Any, wording: bool = False, **kwargs: Any) -> str:
    """`fn` must raise on CPU, and the same type of exception on device "jax"; its arguments there must be unchanged.

    wording:  the first line of the message must be the same too.
    returns:  the message on device "jax".
    """
    __tracebackhide__ = True
    call = _Call(fn, args, kwargs, None, None)
    expected, actual = call.both(fn, args, kwargs)
    if not isinstance(expected, _Raised):
        raise AssertionError(call.text(f"CPU torch raises nothing, but returns {_described(expected[0])}"))
    call.same_error(actual, expected, wording=wording)
    return str(actual.error)


def assert_same_result(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    values: bool = True,
    strides: bool = False,
    on: str | None = DEVICE,
    what: str = "",
    tolerance: Callable[[torch.dtype], tuple[float, float] | None] | None = None,
) -> None:
    """`actual` must be what CPU torch's `expected` is: structure, shapes, dtypes, values.

    rtol, atol: for all tensors; by default torch.testing's for their dtype.
    tolerance:  (rtol, atol) for a dtype, in place of these; or None for torch.testing's.
    values, strides: whether to compare them.
    on:    the type of device `actual`'s tensors must be on (None: any).
    what:  said in front of the message, as "torch.add".
    """
    __tracebackhide__ = True
    prefix = f"{what}: " if what else ""
    actual_leaves, actual_tree = pytree.tree_flatten(actual)
    expected_leaves, expected_tree = pytree.tree_flatten(expected)
    if actual_tree != expected_tree:
        raise AssertionError(f"{prefix}result is {_described(actual)}, but torch's is {_described(expected)}")
    for i, (ours, theirs) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        name = f"{prefix}result {i}" if len(expected_leaves) > 1 else f"{prefix}result"
        if tolerance is not None and isinstance(theirs, torch.Tensor):
            rtol, atol = tolerance(theirs.dtype) or (None, None)
        problem = _difference(ours, theirs, rtol, atol, values=values, strides=strides, on=on)
        if problem:
            raise AssertionError(f"{name}: {problem}\n  got:   {_described(ours)}\n  torch: {_described(theirs)}")


def _difference(
    ours: Any, theirs: Any, rtol: float | None, atol: float | None, *, values: bool, strides: bool, on: str | None
) -> str | None:
    """One line on how `ours` differs from `theirs`; None if it does not."""
    if not isinstance(theirs, torch.Tensor):
        if type(ours) is not type(theirs):
            return f"type is {type(ours).__name__}, not {type(theirs).__name__}"
        if isinstance(theirs, (float, complex)):
            try:
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                return " ".join(str(error).split())
            return None
        return None if not values or ours == theirs else f"value is {ours!r}, not {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"type is {type(ours).__name__}, not Tensor"
    if on is not None and ours.device.type != on:
        return f"device is {ours.device}, not {on}"
    if ours.dtype != theirs.dtype:
        return f"dtype is {ours.dtype}, not {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"shape is {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    if ours.requires_grad != theirs.requires_grad:
        return f"requires_grad is {ours.requires_grad}, not {theirs.requires_grad}"
    if strides and theirs.layout == torch.strided:
        if ours.stride() != theirs.stride():
            return f"stride is {ours.stride()}, not {theirs.stride()}"
        if ours.storage_offset() != theirs.storage_offset():
            return f"storage_offset is {ours.storage_offset()}, not {theirs.storage_offset()}"
    if not values:
        return None
    ours, theirs = ours.detach().cpu(), theirs.detach()
    if theirs.dtype.is_floating_point and theirs.dtype.itemsize == 1:
        ours, theirs = ours.float(), theirs.float()  # torch.testing cannot compare float8
    default_rtol, default_atol = torch.testing._comparison.default_tolerances(theirs)
    try:
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=default_rtol if rtol is None else rtol,
            atol=default_atol if atol is None else atol,
            equal_nan=True,
            check_stride=False,
        )
    except AssertionError as error:
        return "values differ: " + " ".join(str(error).partition("\n\n")[2].split() or str(error).split())
    return None


class _Raised:
    """An exception in place of a result, and the call's arguments afterwards."""

    def __init__(self, error: Exception, arguments: Any) -> None:
        self.error, self.arguments = error, arguments

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:300]}"


class _Call:
    """One call of a function, and how its forms are compared between CPU and device "jax"."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.rtol, self.atol = rtol, atol
        self.name = _name(fn)

    # -- the forms -----------------------------------------------------------------------------------------------------

    def compare_functional(self) -> None:
        __tracebackhide__ = True
        expected, actual = self.both(self.fn, self.args, self.kwargs)
        if isinstance(expected, _Raised):
            raise AssertionError(
                self.text(f"CPU torch raises {expected}\nIf that is meant, use assert_same_error.")
            ) from expected.error
        self.same(actual, expected)

    def compare_inplace(self) -> None:
        __tracebackhide__ = True
        name = self.fn.__name__ + "_"
        owner = next((owner for owner in (torch.Tensor, torch, torch.nn.functional) if hasattr(owner, name)), None)
        if owner is None:
            raise ValueError(f"assert_matches_torch: {self.name} has no in-place form {name}.")
        inplace = getattr(owner, name)
        target = self.args[0]
        if not isinstance(target, torch.Tensor):
            raise ValueError(f"assert_matches_torch: the first argument of {name} must be a tensor.")

        def alone(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = inplace(x, *args, **kwargs)
            if result is not x:
                raise AssertionError(self.text("the in-place form returned another tensor than its `self`", name))
            return result

        def as_view(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            base = torch.stack([x, x, x])
            inplace(base[1], *args, **kwargs)
            return base

        for variant in (alone, as_view):
            expected, actual = self.both(variant, self.args, self.kwargs)
            self.same(actual, expected, name if variant is alone else f"{name} on a view, whole base")

    def compare_out(self) -> None:
        __tracebackhide__ = True
        like = self.fn(*moved(self.args, "cpu"), **moved(self.kwargs, "cpu"))

        def call(outs: Any, *args: Any, **kwargs: Any) -> Any:
            result = self.fn(*args, **kwargs, out=outs)
            for given, returned in zip(pytree.tree_leaves(outs), pytree.tree_leaves(result), strict=True):
                if given is not returned:
                    raise AssertionError(self.text("the returned tensor is not the one given as `out`", "out="))
            return outs

        for form, make in (("out=", torch.zeros_like), ("out= of size 0", lambda x: x.new_empty(0))):
            outs = make(like) if isinstance(like, torch.Tensor) else tuple(map(make, like))
            expected, actual = self.both(call, (outs, *self.args), self.kwargs)
            self.same(actual, expected, form)

    def compare_gradients(self) -> None:
        __tracebackhide__ = True

        def gradients(*args: Any, **kwargs: Any) -> Any:
            inputs = [
                x
                for x in pytree.tree_leaves((args, kwargs))
                if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
            ]
            inputs = list({id(x): x.requires_grad_() for x in inputs}.values())
            outputs = pytree.tree_leaves(self.fn(*args, **kwargs))
            return gradients_of([x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad], inputs)

        expected, actual = self.both(gradients, self.args, self.kwargs)
        if isinstance(expected, _Raised):
            raise AssertionError(self.text(f"CPU torch raises {expected}", "gradients")) from expected.error
        self.same(actual, expected, "gradients")

    # -- comparing -----------------------------------------------------------------------------------------------------

    def both(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """(result, arguments afterwards) of `fn` on CPU and on device "jax"; or what it raised."""
        __tracebackhide__ = True
        results: list[Any] = []
        for device in ("cpu", DEVICE):
            own_args, own_kwargs = moved((args, kwargs), device)
            arguments = (own_args, own_kwargs)
            try:
                result = fn(*own_args, **own_kwargs)
            except AssertionError:
                raise
            except Exception as error:
                results.append(_Raised(error, pytree.tree_map(_without_grad, arguments)))
            else:
                results.append((result, pytree.tree_map(_without_grad, arguments)))
        return results[0], results[1]

    def same(self, actual: Any, expected: Any, form: str = "") -> None:
        __tracebackhide__ = True
        if isinstance(expected, _Raised):
            self.same_error(actual, expected)
            return
        if isinstance(actual, _Raised):
            raise AssertionError(self.text(f'device "jax" raises {actual}', form)) from actual.error
        on = DEVICE if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((self.args, self.kwargs))) else None
        for ours, theirs, what in zip(actual, expected, ("", "arguments afterwards, "), strict=True):
            try:
                assert_same_result(ours, theirs, rtol=self.rtol, atol=self.atol, on=None if what else on)
            except AssertionError as error:
                raise AssertionError(self.text(f"{what}{error}", form)) from None

    def same_error(self, actual: Any, expected: _Raised, *, wording: bool = False) -> None:
        __tracebackhide__ = True
        if not isinstance(actual, _Raised):
            raise AssertionError(
                self.text(f"raises nothing and gives {_described(actual[0])}, but CPU torch {expected}")
            )
        if not isinstance(actual.error, type(expected.error)):
            raise AssertionError(self.text(f"raises {actual}\n  torch: {expected}")) from actual.error
        if wording and str(actual.error).partition("\n")[0] != str(expected.error).partition("\n")[0]:
            raise AssertionError(self.text(f"says {actual}\n  torch: {expected}")) from actual.error
        try:
            assert_same_result(actual.arguments, expected.arguments, on=None)
        except AssertionError as error:
            raise AssertionError(self.text(f"raises as torch does, but arguments have changed: {error}")) from None

    def text(self, problem: str, form: str = "") -> str:
        arguments = [_described(x) for x in self.args] + [f"{k}={_described(v)}" for k, v in self.kwargs.items()]
        lines = [f"{self.name}{f' ({form})' if form else ''}: {problem}", "  called with:"]
        return "\n".join(lines + [f"    {argument}" for argument in arguments])


def gradients_of(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of `inputs`, for gradients of `outputs` that are the same random numbers on every device.

    An input that no output depends on has zeros, so that "no gradient" and "a gradient of zero" are one.
    """
    if not outputs:
        raise ValueError("no output requires grad")
    given = [sample(x.shape, x.dtype, low=-1, high=1, seed=7 + i).to(x.device) for i, x in enumerate(outputs)]
    found = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _without_grad(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", repr(fn))
    if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(fn)
    module = getattr(fn, "__module__", None) or ("torch" if getattr(torch, name, None) is fn else "")
    if getattr(torch.Tensor, name, None) is fn:
        module = "torch.Tensor"
    return f"{module}.{name}" if module.startswith("torch") else name


def _described(value: Any) -> str:
    """`value` in one line: a small tensor with its values, a large one by shape."""
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype}".removeprefix("torch.") + str(list(value.shape))
        if value.layout == torch.strided and not value.is_contiguous():
            text += f" stride {value.stride()}"
        if value.numel() <= 12:
            try:
                text += f" {value.detach().cpu().tolist()}"
            except Exception as error:  # describing must not hide the failure it describes
                text += f" <{type(error).__name__} when read>"
        return text
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_described(x) for x in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value) if len(repr(value)) <= 200 else repr(value)[:200] + "..."


if __name__ == "__main__":
    from torchax_core.conformance.command import app

    app()
