"""The accuracy check: each op on device "jax" against CPU torch on the same inputs, what it writes included.

A result may be off by its dtype's relative tolerance, of itself and of the largest number in it. Where it is not, the op is
run in double precision as well, and may be 16 times as far from that as CPU torch is: what cancels is nobody's fault.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.errors import AccuracyError, AccuracyWarning
from torchax_core.tensor import Tensor, wrap_array
from torchax_core.twins import Twins, values_of, widened
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
_TIES = re.compile(r"(^|_)(sort|topk|argsort|kthvalue|median|nanmedian|mode|msort)($|_)")
_CPU_LACKS = re.compile(
    r"not implemented|not (currently )?support|unsupported|Could not run|only supported|not available"
)


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

    def before(self, call: Call) -> _Twin | None:
        """The twins of the arguments; None for a call that is passed over."""
        reason = _reason(call)
        if reason:
            self.passed_over[reason, call.name] += 1
            return None
        with torch.no_grad():
            return _Twin(call)

    def after(self, call: Call, before: _Twin | None, result: Any) -> None:
        """Run the twin on the CPU and compare."""
        if before is None:
            return
        with torch.no_grad():
            difference = self._compared(call, before, result)
        if difference is not None:
            self._found(difference, call)

    def _compared(self, call: Call, twin: _Twin, result: Any) -> Difference | None:
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

    def in_backward(self, call: Call, before: _Twin | None, given: Sequence[Any], gradients: Sequence[Any]) -> None:
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


# -- the twin of a call ----------------------------------------------------------------------------


class _Twin:
    """One call as CPU torch runs it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.func = _ELSEWHERE.get(call.name, call.func)
        self.twins = Twins()
        self.args = self.twins.of(call.args)
        self.kwargs = self.twins.of(call.kwargs)
        self.mutable = getattr(getattr(call.func, "_schema", None), "is_mutable", True)
        tensors = [tensor for tensor, _ in self.twins.pairs]
        self.wants = [t.requires_grad and (t.dtype.is_floating_point or t.dtype.is_complex) for t in tensors]
        self._pristine = self._widened() if self.mutable else None  # CPU torch will write to the twins
        self._truth: dict[str, list[Any]] | None = None

    def _widened(self) -> tuple[Any, Any]:
        return widened(self.args), widened(self.kwargs)

    def run(self) -> Any:
        """CPU torch's result; an exception that it raises; or the reason to pass the call over."""
        try:
            result, drew = _on_cpu(lambda: self.func(*self.args, **self.kwargs))
        except NotImplementedError:
            return "CPU torch lacks the op"
        except Exception as error:
            return "CPU torch lacks the op for these arguments" if _CPU_LACKS.search(str(error)) else error
        return "random" if drew else (result,)

    def results(self, result: Any, outcome: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        """(name, ours, CPU's, place) of what the call returned and wrote."""
        seen: set[int] = set()
        ours, theirs = pytree.tree_leaves(result), pytree.tree_leaves(outcome[0])
        if len(ours) != len(theirs):
            yield "the number of results", len(ours), len(theirs), None
            return
        unsettled = bool(_TIES.search(_base_name(self.call.name)))
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if other is None:  # a gradient that was not asked for
                continue
            if unsettled and isinstance(other, torch.Tensor) and other.dtype is torch.int64 and len(theirs) > 1:
                continue  # which of several equal elements comes first
            seen.add(id(one))
            yield ("the result" if len(ours) == 1 else f"result {i}"), one, other, ("result", i)
        for i, ((tensor, twin), store) in enumerate(zip(self.twins.pairs, self.twins.stores, strict=True)):
            untouched = store is not None and store.array is self.twins.bases[id(store)].array
            if id(tensor) not in seen and (self.mutable or not untouched) and store is not None:
                seen.add(id(tensor))
                yield f"argument {i} after the call", tensor, twin, ("argument", i)
        for base in self.twins.bases.values():
            if base.shared and base.store.array is not base.array and base.store.array.shape == base.array.shape:
                yield "the storage written to", wrap_array(base.store.array), base.twin, None

    def truth(self, place: Any) -> Any:
        """The result or argument at `place` as computed in double precision; None if it cannot be."""
        if place is None:
            return None
        if self._truth is None:
            self._truth = {"result": [], "argument": []}
            args, kwargs = self._pristine if self._pristine is not None else self._widened()
            with contextlib.suppress(Exception):  # not every op takes every dtype
                result, _ = _on_cpu(lambda: self.func(*args, **kwargs))
                tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                self._truth = {"result": pytree.tree_leaves(result), "argument": tensors}
        kind, at = place
        found = self._truth[kind]
        return found[at] if at < len(found) else None

    def gradients(self, given: Sequence[Any], count: int) -> Any:
        """CPU autograd's gradients of the arguments that want them, given those of the results; or a reason."""
        if sum(self.wants) != count or (self.mutable and hasattr(self.func, "_schema")):
            return "gradients of something else than the arguments"
        flags = iter(self.wants)
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copy = value.detach().clone()
            if next(flags, False):
                leaves.append(copy.requires_grad_())
            return copy

        args, kwargs = pytree.tree_map(leaf, (self.args, self.kwargs))
        cotangents = [None if g is None else values_of(g) for g in given]
        try:
            with torch.enable_grad():
                result, drew = _on_cpu(lambda: self.func(*args, **kwargs))
            if drew:
                return "random"
            outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            if len(outputs) != len(cotangents):
                return "gradients of something else than the results"
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
            if not pairs:
                return [None] * count
            return torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
        except NotImplementedError:
            return "CPU torch lacks the op's gradient"


def _on_cpu(run: Callable[[], Any]) -> tuple[Any, bool]:
    """What `run` returns, and whether it drew random numbers, which are put back."""
    state = torch.get_rng_state()
    try:
        with torch._C._DisableAutocast(), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run()
        return result, not torch.equal(state, torch.get_rng_state())
    finally:
        torch.set_rng_state(state)


def _linear_backward(self: Any, grad_output: Any, weight: Any, output_mask: Sequence[bool]) -> list[Any]:
    given, inputs = (t.reshape(-1, t.shape[-1]) for t in (grad_output, self))
    found = [grad_output @ weight, given.mT @ inputs, given.sum(0)]
    return [g if wanted else None for g, wanted in zip(found, output_mask, strict=True)]


def _matmul_backward(grad: Any, self: Any, other: Any, mask: Sequence[bool]) -> list[Any]:
    left = self if self.dim() > 1 else self.unsqueeze(0)
    right = other if other.dim() > 1 else other.unsqueeze(-1)
    grad = grad if self.dim() > 1 else grad.unsqueeze(-2 if other.dim() > 1 else -1)
    grad = grad if other.dim() > 1 else grad.unsqueeze(-1)
    found = [
        (grad @ right.mT).sum_to_size(left.shape).reshape(self.shape),
        (left.mT @ grad).sum_to_size(right.shape).reshape(other.shape),
    ]
    return [g if wanted else None for g, wanted in zip(found, mask, strict=True)]


_ELSEWHERE: dict[str, Any] = {"aten::linear_backward": _linear_backward, "aten::matmul_backward": _matmul_backward}
"""What torch has no CPU kernel of, by other ops."""


def _base_name(name: str) -> str:
    """ "sort" of "aten::sort.stable", "interpolate" of "torch.nn.functional.interpolate"."""
    return name.partition("::")[2].partition(".")[0] if "::" in name else name.rpartition(".")[2]


def _reason(call: Call) -> str:
    """Why a call is not compared; empty if it is."""
    name = _base_name(call.name)
    if _UNDEFINED.search(name):
        return "values that are not defined"
    if _UNSETTLED.search(name):
        return "a decomposition, unique only up to signs and order"
    if _TIES.search(name) and name.startswith("arg"):
        return "an order of equal elements"
    if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((call.args, call.kwargs))):
        return "random"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
