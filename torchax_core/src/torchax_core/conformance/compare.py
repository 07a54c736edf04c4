"""When a result counts as CPU torch's: tolerances, results that are defined up to a sign, random ones, and the truth in
double precision as the judge between two that are rounded.

float32, complex64:    ten times torch.testing's tolerance
float16, bfloat16:     torch.testing's, and the 1e-3 of torch's own comparison of devices (test_ops.test_compare_cpu)
float64, complex128:   1e-7
integers, bools:       none
"""

from __future__ import annotations

import contextlib
import copy
import re
import unittest.mock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchax_core import testing
from torchax_core.conformance.samples import tensors_in
from torchax_core.conformance.ties import ties_settled

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = [
    "NoSample",
    "another_seed",
    "assert_close",
    "assert_same",
    "call",
    "equal",
    "has_values",
    "in_double",
    "reference",
    "tolerance",
]

# Results that memory happens to hold.
_UNINITIALIZED = re.compile(r"(^|_|\.)empty|^resize_")
# Results that are right only up to a sign, phase or rotation: compared through OpInfo's own invariant if not the same.
_GAUGE = re.compile(r"^(linalg\.)?(eigh?|svd)$|_lowrank$|^linalg\.(eigh?|svd)")

_FURTHER = 4  # how many times further from the truth than CPU torch a result may be
_TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1.3e-5, 1e-4),
    torch.complex64: (1.3e-5, 1e-4),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-3),
}
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER |= {torch.complex64: torch.complex128}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class NoSample(Exception):
    """The sample says nothing about this mode: CPU torch raises, or the result is no view."""


def tolerance(dtype: torch.dtype) -> tuple[float, float] | None:
    """(rtol, atol) for results in `dtype`; None for torch.testing's default."""
    return _TOLERANCES.get(dtype)


# -- calling -----------------------------------------------------------------------------------------------------------


def call(
    fn: Callable[..., Any], sample: SampleInput, device: str, **more: Any
) -> tuple[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """`fn`'s result for a copy of the sample on `device`, and that copy (input, args, kwargs) afterwards."""
    arguments = testing.moved((sample.input, tuple(sample.args), dict(sample.kwargs)), device)
    if sample.name == "tensor_split":  # its tensor of indices must be on the CPU, whatever the device
        arguments = (arguments[0], tuple(sample.args), dict(sample.kwargs))
    if sample.name == "to":
        arguments = (arguments[0], tuple(device if x == "cpu" else x for x in arguments[1]), arguments[2])
    return fn(arguments[0], *arguments[1], **arguments[2], **more), arguments


def reference(fn: Callable[..., Any], sample: SampleInput) -> tuple[Any, Any]:
    """`call` on the CPU. Raises NoSample if `fn` raises."""
    try:
        return call(fn, sample, "cpu")
    except Exception as error:
        raise NoSample from error


@contextlib.contextmanager
def another_seed() -> Iterator[None]:
    """Random numbers are others than usual, even where OpInfo sets the seed itself."""
    real = torch.manual_seed
    with unittest.mock.patch.object(torch, "manual_seed", lambda seed: real(int(seed) + 1)):
        torch.manual_seed(0)
        yield
    torch.manual_seed(0)


def has_values(op: OpInfo, fn: Callable[..., Any], sample: SampleInput, expected: Any) -> bool:
    """Whether the values of a result are defined; not if another seed gives others, or none were written."""
    if _UNINITIALIZED.search(op.full_name):
        return False
    with another_seed():
        again = reference(fn, sample)[0]
    return equal(again, expected)


def equal(one: Any, other: Any) -> bool:
    """Whether two results on the CPU are the same to the bit."""
    try:
        testing.assert_same_result(one, other, rtol=0, atol=0, on=None)
    except AssertionError:
        return False
    return True


# -- comparing ---------------------------------------------------------------------------------------------------------


def assert_same(
    op: OpInfo,
    fn: Callable[..., Any],
    sample: SampleInput,
    actual: Any,
    expected: Any,
    *,
    values: bool = True,
    strides: bool = False,
    what: str = "",
    precision: torch.dtype | None = None,
    formats: bool = True,
) -> None:
    """`actual`, of `fn` on the device, must be CPU torch's `expected`, up to what `op` leaves undefined.

    values:    whether the values are defined.
    strides:   whether strides must be the same to the number; else only where torch promises a memory format.
    precision: what the values were computed in, if not in their own dtype.
    formats:   whether torch promises one.
    """
    if values:
        actual = ties_settled(op, sample, actual, expected, batched=what == "vmap")
    if _GAUGE.search(op.full_name):
        process = sample.output_process_fn_grad
        if values and not _is_same(actual, expected):
            what = f"{what} invariant of".strip()
            assert_close(fn, sample, process(actual), process(expected), what=what, precision=precision)
            values = False
        assert_close(fn, sample, actual, expected, values=values, strides=strides, what=what)
        return
    assert_close(fn, sample, actual, expected, values=values, strides=strides, what=what, precision=precision)
    if not formats:
        return
    for i, (ours, theirs) in enumerate(zip(tensors_in(actual), tensors_in(expected), strict=True)):
        _assert_same_format(ours, theirs, f"{what}: result {i}" if what else f"result {i}")


def assert_close(
    fn: Callable[..., Any],
    sample: SampleInput,
    actual: Any,
    expected: Any,
    *,
    values: bool = True,
    strides: bool = False,
    what: str = "",
    precision: torch.dtype | None = None,
) -> None:
    """`actual`, of `fn` on the device, must be within tolerance of CPU torch's `expected`, or as close to the truth."""
    on = testing.DEVICE if tensors_in((sample.input, sample.args, sample.kwargs)) or "device" in sample.kwargs else None

    def allowed(dtype: torch.dtype) -> tuple[float, float] | None:
        own, computed = tolerance(dtype), tolerance(precision or dtype)
        return own if own is None or computed is None else max(own, computed)

    def compare(values: bool) -> None:
        testing.assert_same_result(
            actual, expected, values=values, strides=strides, on=on, what=what, tolerance=allowed
        )

    try:
        compare(values)
    except AssertionError:
        compare(False)
        if not _as_good(fn, sample, actual, expected, precision):
            raise


def _is_same(actual: Any, expected: Any) -> bool:
    try:
        testing.assert_same_result(actual, expected, on=None, tolerance=tolerance)
    except AssertionError:
        return False
    return True


def _assert_same_format(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Where torch's result is in a memory format, ours must be; other strides are an accident of the algorithm."""
    if theirs.layout != torch.strided:
        return
    for format in _FORMATS[: 1 if theirs.dim() < 4 else 3]:
        if (
            format is torch.channels_last
            and theirs.dim() != 4
            or format is torch.channels_last_3d
            and theirs.dim() != 5
        ):
            continue
        if theirs.is_contiguous(memory_format=format):
            if not ours.is_contiguous(memory_format=format):
                raise AssertionError(
                    f"{what}: stride is {ours.stride()}, which is not {str(format).removeprefix('torch.')} as torch's "
                    f"{theirs.stride()}, for shape {tuple(theirs.shape)}"
                )
            return


def _as_good(
    fn: Callable[..., Any], sample: SampleInput, actual: Any, expected: Any, precision: torch.dtype | None
) -> bool:
    """Whether `actual` is not much further than `expected` from what `fn` gives in double precision.

    precision: what both were computed in, where they were written to tensors of another dtype.
    """
    wide = copy.copy(sample)
    wide.input, wide.args, wide.kwargs = pytree.tree_map(in_double, (sample.input, sample.args, sample.kwargs))
    try:
        exact = tensors_in(call(getattr(fn, "in_double", fn), wide, "cpu")[0])
    except Exception:  # CPU torch does not take the sample in double precision: no reference, so the case stays failed
        return False
    ours, theirs = tensors_in(actual), tensors_in(expected)

    def rounded(x: torch.Tensor) -> bool:
        return x.dtype in _WIDER or precision in _WIDER and (x.is_floating_point() or x.is_complex())

    if len(exact) != len(theirs) or not any(map(rounded, theirs)):
        return False
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        if not rounded(other) or truth.shape != other.shape:
            if not torch.equal(mine.detach().cpu(), other.detach()):
                return False
            continue
        mine, other = (x.detach().cpu().to(truth.dtype) for x in (mine, other))
        finite = truth.isfinite() & other.isfinite()
        if not torch.equal(mine.isfinite() & finite, finite):
            return False
        error, allowed = (((x - truth).abs()[finite]).max().item() if finite.any() else 0.0 for x in (mine, other))
        if error > _FURTHER * allowed:
            return False
    return True


def in_double(value: Any) -> Any:
    """A tensor or dtype in double precision, if it is rounded to less; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
        return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value
