"""What each mode checks of one sample: forward, in-place and `out=` forms, views, vmap and errors. Gradients: gradients.py."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchax_core import testing
from torchax_core.conformance import gradients
from torchax_core.conformance.compare import NoSample, assert_same, call, equal, has_values, in_double, reference
from torchax_core.conformance.samples import Sample, tensors_in

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["CHECKS"]


def _forward(op: OpInfo, sample: Sample) -> None:
    """The result, and that the arguments are left as CPU torch leaves them."""
    expected, expected_arguments = reference(op, sample.input)
    values = has_values(op, op, sample.input, expected)
    actual, arguments = call(op, sample.input, testing.DEVICE)
    assert_same(op, op, sample.input, actual, expected, values=values)
    ours, theirs = tensors_in(arguments), tensors_in(expected_arguments)
    testing.assert_same_result(ours, theirs, values=values, on=None, what="arguments afterwards")


# -- writing -----------------------------------------------------------------------------------------------------------


def _inplace(op: OpInfo, sample: Sample) -> None:
    """The in-place form: returns its very `self`; on part of a larger tensor, it writes there and nowhere else."""
    variant = op.inplace_variant

    def alone(x: Any, *args: Any, **kwargs: Any) -> Any:
        result = variant(x, *args, **kwargs)
        if isinstance(x, torch.Tensor) and result is not x:
            raise AssertionError("the in-place form returned another tensor than its `self`")
        return x

    def on_part(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = torch.stack([x, x, x], dim=-1)
        alone(base[..., 1], *args, **kwargs)
        return base

    _same_or_same_error(op, alone, sample.input)
    if sample.first and isinstance(sample.input.input, torch.Tensor) and sample.input.input.layout == torch.strided:
        _same_or_same_error(op, on_part, sample.input, "on part of a tensor, the whole of it")


def _out(op: OpInfo, sample: Sample) -> None:
    """`out=`: what is returned, resized with torch's warning, cast or refused by torch's rules. Of all but the first sample
    only the plain case."""
    like, _ = reference(op, sample.input)
    tensors = tensors_in(like)
    if not tensors:
        raise NoSample
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"out=": torch.zeros_like}
    if sample.first and all(x.layout == torch.strided for x in tensors):
        forms |= _OUTS
    compared = [_compare_out(op, sample, like, form, pytree.tree_map(make, like)) for form, make in forms.items()]
    if not any(compared):
        raise NoSample


def _compare_out(op: OpInfo, sample: Sample, like: Any, form: str, made: Any) -> bool:
    """Compare one form of `out=`, of which `made` are the tensors to write to; False if CPU torch keeps to no rule."""
    here, there = _Writing(op, made, "cpu"), _Writing(op, made, testing.DEVICE)
    more = {"what": form, "precision": tensors_in(like)[0].dtype, "on_device": there}
    if form == _WIDER:
        # the rule is that the result is cast to `out`; CPU kernels older than the rule refuse, which nobody relies on
        try:
            call(here, sample.input, "cpu")
        except (RuntimeError, TypeError):
            return False
    try:
        if form == _STRIDED and has_values(op, op, sample.input, like):
            written, _ = reference(here, sample.input)
            if not equal(pytree.tree_map(torch.clone, written), pytree.tree_map(torch.clone, like)):
                return False  # some CPU kernels leave a non-contiguous `out` as it was
        _same_or_same_error(op, here, sample.input, **more)
    except NoSample:
        return False
    if here.silent != there.silent:
        raise AssertionError(f"{form}: returns {'nothing' if there.silent else 'its result'}, and CPU torch does not")
    if form == _LARGER and here.warned and not there.warned:
        raise AssertionError(f"{form}: resizes without torch's warning")
    return True


class _Writing:
    """`op` writing to copies of `made`, which are its result."""

    def __init__(self, op: OpInfo, made: Any, device: str) -> None:
        self.op, self.made, self.device = op, made, device
        self.warned = self.silent = False

    def in_double(self, *args: Any, **kwargs: Any) -> Any:
        """The same with targets that do not round, for arguments that are in double precision themselves."""
        return _Writing(self.op, pytree.tree_map(in_double, self.made), self.device)(*args, **kwargs)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((x, args, kwargs))
        outs = testing.moved(self.made, tensors[0].device if tensors else self.device)
        before = [(out.shape, out.stride()) for out in tensors_in(outs)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = self.op(x, *args, **kwargs, out=outs)
        self.silent = result is None  # as torch's split_with_sizes_copy is
        if not self.silent and not all(map(operator.is_, pytree.tree_leaves(outs), pytree.tree_leaves(result))):
            raise AssertionError("the returned tensor is not the one given as `out`")
        for (shape, stride), out in zip(before, tensors_in(outs), strict=True):
            if out.shape == shape and out.numel() > 1 and out.stride() != stride:
                raise AssertionError(
                    f"`out` had the right shape {tuple(shape)}, but its stride {stride} is now {out.stride()}"
                )
        self.warned |= any("was resized since it had shape" in str(w.message) for w in caught)
        return outs


def _larger(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*x.shape, 2), dtype=x.dtype)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*x.shape, 2), dtype=x.dtype)[..., 1]


def _wider(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.complex128 if x.is_complex() else torch.float64)


_LARGER, _STRIDED, _WIDER = "out= of another size", "out= non-contiguous", "out= in double precision"
_OUTS = {
    "out= of size 0": lambda x: torch.zeros(0, dtype=x.dtype),
    _LARGER: _larger,
    _STRIDED: _strided,
    _WIDER: _wider,
    "out= int64": lambda x: torch.zeros(x.shape, dtype=torch.int64),
}


def _same_or_same_error(
    op: OpInfo,
    fn: Callable[..., Any],
    sample: SampleInput,
    what: str = "",
    *,
    on_device: Callable[..., Any] | None = None,
    **more: Any,
) -> None:
    """Where CPU torch raises, the device must raise the same. `on_device`: what to call there, if not `fn`."""
    try:
        expected, _ = call(fn, sample, "cpu")
    except AssertionError:
        raise NoSample from None  # torch itself does not keep to what is checked
    except NotImplementedError:
        raise NoSample from None  # the CPU lacks a kernel, which is no rule
    except Exception as error:
        _raises(on_device or fn, sample, error, what)
        return
    values = has_values(op, fn, sample, expected)
    actual, _ = call(on_device or fn, sample, testing.DEVICE)
    assert_same(op, fn, sample, actual, expected, values=values, what=what, **more)


def _raises(fn: Callable[..., Any], sample: SampleInput, expected: Exception, what: str) -> Exception:
    """The error of `fn` on the device, which must be of the type of CPU torch's."""
    said = f"{what}: " if what else ""
    theirs = f"torch {type(expected).__name__}: {_short(expected)}"
    try:
        result, _ = call(fn, sample, testing.DEVICE)
    except Exception as error:
        if isinstance(error, type(expected)):
            return error
        raise AssertionError(f"{said}raises {type(error).__name__}: {_short(error)}, but {theirs}") from error
    raise AssertionError(f"{said}raises nothing and gives {testing._described(result)[:200]}, but {theirs}")


def _short(error: Exception) -> str:
    return repr(str(error)[:200])


# -- views -------------------------------------------------------------------------------------------------------------


def _view(op: OpInfo, sample: Sample) -> None:
    """Where CPU torch gives a view of the input: its strides, and that writing to either is seen in the other."""
    given = sample.input
    if not isinstance(given.input, torch.Tensor) or given.input.layout != torch.strided:
        raise NoSample
    result, arguments = reference(op, given)
    theirs = pytree.tree_leaves(result)
    found = [i for i, part in enumerate(theirs) if _aliases(part, arguments[0])]
    if not found:
        raise NoSample
    values = has_values(op, op, given, result)
    actual, _ = call(op, given, testing.DEVICE)
    ours = pytree.tree_leaves(actual)
    for i in found:
        testing.assert_same_result(ours[i], theirs[i], values=values, strides=True, what="view")

    def write_view(*args: Any, **kwargs: Any) -> Any:
        view = pytree.tree_leaves(op(*args, **kwargs))[found[0]]
        view.copy_(testing.sample(view.shape, view.dtype, seed=11))
        return view, args[0]

    def write_base(*args: Any, **kwargs: Any) -> Any:
        view = pytree.tree_leaves(op(*args, **kwargs))[found[0]]
        args[0].copy_(testing.sample(args[0].shape, args[0].dtype, seed=12))
        return view, args[0]

    if torch._debug_has_internal_overlap(theirs[found[0]]) != _TOO_HARD or not _overlaps(theirs[found[0]]):
        _same_or_same_error(op, write_view, given, "after writing to the view", strides=True)
    _same_or_same_error(op, write_base, given, "after writing to the base", strides=True)


_TOO_HARD = 2  # torch cannot tell whether elements of a tensor share memory, and lets it be written to in any order


def _overlaps(view: torch.Tensor) -> bool:
    reach = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    positions = torch.arange(reach).as_strided(view.shape, view.stride())
    return positions.unique().numel() < view.numel()


def _aliases(part: Any, x: torch.Tensor) -> bool:
    if not isinstance(part, torch.Tensor) or part.layout != torch.strided or not part.numel():
        return False
    same_memory = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return same_memory and (part is x or part._is_view())  # unsafe_split shares memory, but is no view


# -- batching ----------------------------------------------------------------------------------------------------------


def _vmap(op: OpInfo, sample: Sample) -> None:
    """`torch.func.vmap` over all tensors of the sample, where CPU torch can: two of each, the input's second one halved."""
    given = tensors_in(sample.input.input)
    if not given or any(x.layout != torch.strided for x in tensors_in((sample.input.args, sample.input.kwargs, given))):
        raise NoSample
    inputs = len(given)

    def mapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((x, args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def one(*tensors: torch.Tensor) -> Any:
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            own, own_args, own_kwargs = pytree.tree_unflatten(values, spec)
            return op(own, *own_args, **own_kwargs)

        batches = [
            torch.stack([leaves[i], leaves[i] / 2 if n < inputs and leaves[i].is_floating_point() else leaves[i]])
            for n, i in enumerate(places)
        ]
        return torch.func.vmap(one, randomness="different")(*batches)

    expected, _ = reference(mapped, sample.input)
    values = has_values(op, mapped, sample.input, expected)
    actual, _ = call(mapped, sample.input, testing.DEVICE)
    assert_same(op, mapped, sample.input, actual, expected, values=values, what="vmap", formats=False)


# -- torch.compile -----------------------------------------------------------------------------------------------------


class _Compiled:
    """`op`, compiled where it is called with tensors on the device."""

    def __init__(self, op: OpInfo) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(x.device.type == testing.DEVICE for x in tensors_in((args, kwargs))):
            return self.op(*args, **kwargs)
        torch.compiler.reset()  # or the next sample is one more graph of this function
        # the function itself: dynamo looks neither into an OpInfo, of torch's tests, nor into code of ours
        return torch.compile(self.op.op, backend="torchax")(*args, **kwargs)


def _compile(op: OpInfo, sample: Sample) -> None:
    """The result under `torch.compile(backend="torchax")`, and the gradients of all inputs, where there are any."""
    expected, _ = reference(op, sample.input)
    values = has_values(op, op, sample.input, expected)
    actual, _ = call(_Compiled(op), sample.input, testing.DEVICE)
    assert_same(op, op, sample.input, actual, expected, values=values, what="compiled", formats=False)
    if any(x.requires_grad for x in tensors_in(expected)):
        gradients.first(_Compiled(op), sample)


# -- errors ------------------------------------------------------------------------------------------------------------


def _error(op: OpInfo, sample: Sample) -> None:
    """What CPU torch refuses is refused by the same type of exception, whose message fits torch's own pattern."""
    try:
        call(op, sample.input, "cpu")
    except Exception as error:
        expected = error
    else:
        raise NoSample
    actual = _raises(op, sample.input, expected, "")
    assert sample.error is not None
    pattern = sample.error.error_regex
    if re.search(pattern, str(expected)) and not re.search(pattern, str(actual)):
        raise AssertionError(f"says {_short(actual)}, which torch's pattern {pattern!r} does not fit")


CHECKS: dict[str, Callable[[Any, Sample], None]] = {
    "forward": _forward,
    "inplace": _inplace,
    "out": _out,
    "grad.first": gradients.first,
    "grad.second": gradients.second,
    "grad.forward": gradients.forward,
    "view": _view,
    "vmap": _vmap,
    "compile": _compile,
    "error": _error,
}
"""By mode: raises AssertionError, or whatever the device raises, for a sample that is wrong; NoSample if it says nothing."""
