"""The accuracy check: each op on device "jax" against CPU torch on the same inputs, what it writes included.

A result may be off by its dtype's relative tolerance, of itself and of the largest number in it. Where it is not, the op is
run in double precision as well, and may be 16 times as far from that as CPU torch is: what cancels is nobody's fault.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.errors import AccuracyError, AccuracyWarning
from torchax_core.tensor import Tensor
from torchax_core.twins import TIES, TwinCall, base_name, values_of
from torchax_core.watching import Call, Check

__all__ = ["TOLERANCES", "AccuracyCheck", "Difference"]

TOLERANCES = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1.3e-5,
    torch.complex64: 1.3e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.125,
    torch.float8_e4m3fnuz: 0.125,
    torch.float8_e5m2: 0.25,
    torch.float8_e5m2fnuz: 0.25,
}
"""Relative tolerance by dtype; integers and bools must be equal."""

_FURTHER = 16
_UNDEFINED = re.compile(r"(^|_)empty(_|$)|^resize")
_UNSETTLED = re.compile(r"(^|_)(eigh?|svd|svdvals|lowrank|qr|geqrf|lobpcg|eigvals)($|_)")
_COLLECTIVES = re.compile(r"_?(c10d|dtensor|symm_mem)")


@dataclasses.dataclass
class Difference:
    """Where a result differs from CPU torch's.

    op, inputs:  the op, and its arguments with shapes and dtypes.
    what:        which result, and how it differs.
    error:       the largest absolute error; None where values were not compared (another shape, an exception on CPU).
    tolerance:   what would have been allowed there.
    line:        where in the user's code.
    """

    op: str
    inputs: str
    what: str
    error: float | None
    tolerance: float | None
    line: str

    def __str__(self) -> str:
        return f"{self.op} differs from CPU torch {self.line}\n  inputs: {self.inputs}\n  {self.what}"


class AccuracyCheck(Check):
    """Compares calls with CPU torch. Mode "raise" stops at the first difference, "warn" warns of the first of each op.

    compared:    how many calls were compared, by op.
    passed_over: how many were not, by reason and op.
    differences: what differed; one per op.
    """

    jitted = "eager"

    def __init__(self, mode: str, tolerance: float | None = None) -> None:
        self.mode = mode
        self.tolerance = tolerance
        self.compared: collections.Counter[str] = collections.Counter()
        self.passed_over: collections.Counter[tuple[str, str]] = collections.Counter()
        self.differences: list[Difference] = []

    def __repr__(self) -> str:
        lines = [f"{sum(self.compared.values())} calls of {len(self.compared)} ops compared with CPU torch"]
        for reason in dict.fromkeys(reason for reason, _ in self.passed_over):
            ops = {op: count for (why, op), count in self.passed_over.items() if why == reason}
            lines.append(f"  {sum(ops.values())} passed over, {reason}: {', '.join(ops)}")
        lines += [f"  {d.op}: {d.what} {d.line}" for d in self.differences]
        return "\n".join(lines)

    # -- a call ----------------------------------------------------------------------------------

    def before(self, call: Call) -> TwinCall | None:
        """The twins of the arguments; None for a call that is passed over."""
        reason = _reason(call)
        if reason:
            self.passed_over[reason, call.name] += 1
            return None
        with torch.no_grad():
            return TwinCall(call)

    def after(self, call: Call, before: TwinCall | None, result: Any) -> None:
        """Run the twin on the CPU and compare."""
        if before is None:
            return
        with torch.no_grad():
            difference = self._compared(call, before, result)
        if difference is not None:
            self._found(difference, call)

    def _compared(self, call: Call, twin: TwinCall, result: Any) -> Difference | None:
        outcome = twin.run()
        if isinstance(outcome, str):
            self.passed_over[outcome, call.name] += 1
            return None
        self.compared[call.name] += 1
        if isinstance(outcome, Exception):
            what = f"CPU torch raises {type(outcome).__name__}: {_first_line(outcome)}"
            return self._difference(call, what, None, None)
        for what, actual, expected, place in twin.results(result, outcome):
            found = self._compare(call, what, actual, expected, functools.partial(twin.truth, place))
            if found is not None:
                return found
        return None

    def in_backward(self, call: Call, before: TwinCall | None, given: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Compare the gradients with those of CPU autograd."""
        if before is None:
            return
        outcome = before.gradients(given, len(gradients))
        if isinstance(outcome, str):
            self.passed_over[outcome, call.name] += 1
            return
        self.compared[f"{call.name}, backward"] += 1
        with torch.no_grad():
            for i, (actual, expected) in enumerate(zip(gradients, outcome, strict=True)):
                if actual is None and expected is None:
                    continue
                if expected is None:
                    expected = torch.zeros(actual.shape, dtype=actual.dtype)
                if actual is None:
                    actual = torch.zeros_like(expected)
                found = self._compare(call, f"gradient {i}", actual, expected, lambda: None)
                if found is not None:
                    self._found(found, call)
                    return

    def _found(self, difference: Difference, call: Call) -> None:
        known = any(d.op == difference.op for d in self.differences)
        if not known:
            self.differences.append(difference)
        if self.mode == "raise":
            raise AccuracyError(
                f"{difference}\n  `torchax explain {difference.op}` says who defines it. "
                'Config(debug_accuracy="warn") warns and goes on.'
            )
        if not known:
            warnings.warn_explicit(str(difference), AccuracyWarning, *(call.place or (__file__, 1)))

    # -- values ----------------------------------------------------------------------------------

    def _compare(
        self, call: Call, what: str, actual: Any, expected: Any, truth: Callable[[], Any]
    ) -> Difference | None:
        if not isinstance(expected, torch.Tensor):
            same = actual == expected or (actual != actual and expected != expected)
            if isinstance(actual, float) and not same:
                actual, expected = (
                    torch.tensor(actual, dtype=torch.float64),
                    torch.tensor(expected, dtype=torch.float64),
                )
            else:
                return (
                    None if same else self._difference(call, f"{what} is {actual}, and {expected} on CPU", None, None)
                )
        if isinstance(actual, Tensor):
            actual = values_of(actual)
        if not isinstance(actual, torch.Tensor):
            return self._difference(call, f"{what} is {actual!r}, and a tensor on CPU", None, None)
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            ours, theirs = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (actual, expected))
            return self._difference(call, f"{what} is {ours}, and {theirs} on CPU", None, None)
        return self._compare_values(call, what, actual, expected.detach().resolve_conj().resolve_neg(), truth)

    def _compare_values(
        self, call: Call, what: str, actual: torch.Tensor, expected: torch.Tensor, truth: Callable[[], Any]
    ) -> Difference | None:
        if not expected.numel():
            return None
        if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
            wrong = actual != expected
            if not wrong.any():
                return None
            error = (actual.double() - expected.double()).abs()
            return self._worst(call, what, actual, expected, error, wrong, torch.zeros_like(error))
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        ours, theirs = actual.to(wide), expected.to(wide)
        error, allowed, wrong = self._judged(ours, theirs, theirs, expected.dtype, 0.0)
        if not wrong.any():
            return None
        better = truth()
        if (
            isinstance(better, torch.Tensor)
            and better.shape == expected.shape
            and (better.dtype.is_floating_point or better.dtype.is_complex)
        ):
            better = better.to(wide)
            own = (theirs - better).abs()
            own = own[own.isfinite()]
            own_error = float(own.max()) if own.numel() else 0.0
            truth_error, truth_allowed, still = self._judged(ours, better, theirs, expected.dtype, _FURTHER * own_error)
            if not still.any():
                return None
            error, allowed, wrong = truth_error, truth_allowed, still
        return self._worst(call, what, actual, expected, error, wrong, allowed)

    def _judged(
        self, ours: torch.Tensor, target: torch.Tensor, special: torch.Tensor, dtype: torch.dtype, more: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(error, allowed, whether it is too large); where CPU's result is inf or NaN, ours must be the same."""
        relative = self.tolerance if self.tolerance is not None else TOLERANCES.get(dtype, 1e-2)
        finite = special.isfinite() & target.isfinite()
        size = target.abs()
        largest = float(size[finite].max()) if finite.any() else 0.0
        allowed = relative * size + relative * largest + more + torch.finfo(dtype).tiny  # XLA has no subnormals
        error = (ours - target).abs()
        same = (ours == special) | (ours.isnan() & special.isnan())
        wrong = torch.where(finite, ~(error <= allowed), ~same)
        return error, allowed, wrong

    def _worst(
        self,
        call: Call,
        what: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        error: torch.Tensor,
        wrong: torch.Tensor,
        allowed: torch.Tensor,
    ) -> Difference:
        ranked = torch.where(wrong, error.nan_to_num(nan=float("inf")), torch.full_like(error, -1.0))
        at = int(ranked.argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape)] if actual.dim() else []
        worst = float(error.reshape(-1)[at])
        limit = float(allowed.reshape(-1)[at])
        ours, theirs = actual.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
        text = (
            f"{what}: {int(wrong.sum())} of {actual.numel()} elements differ; largest error {worst:.3g} (allowed {limit:.3g}) "
            f"at {index}: {ours:.6g} here, {theirs:.6g} on CPU"
        )
        return self._difference(call, text, worst, limit)

    def _difference(self, call: Call, what: str, error: float | None, tolerance: float | None) -> Difference:
        return Difference(call.name, call.described(), what, error, tolerance, call.line)


def _reason(call: Call) -> str:
    """Why a call is not compared; empty if it is."""
    if _COLLECTIVES.match(call.name):
        return "collectives, which would run in another process group"
    name = base_name(call.name)
    if _UNDEFINED.search(name):
        return "values that are not defined"
    if _UNSETTLED.search(name):
        return "a decomposition, unique only up to signs and order"
    if TIES.search(name) and name.startswith("arg"):
        return "an order of equal elements"
    if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((call.args, call.kwargs))):
        return "random"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
