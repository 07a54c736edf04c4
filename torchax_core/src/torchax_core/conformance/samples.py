"""The samples of a cell: OpInfo's own, evenly chosen, and some of them in layouts that OpInfo leaves out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.conformance.cells import Cell, dtypes_named

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

__all__ = ["Sample", "samples_of", "tensors_in"]

_SEEN = 300  # some ops have thousands of samples; those taken are spread over the first this many


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample. `first`: the first of its cell, which checks that take long are kept to. `error`: what it must raise."""

    name: str
    input: SampleInput
    first: bool = False
    error: ErrorInput | None = None


def samples_of(op: OpInfo, cell: Cell, most: int) -> Iterator[Sample]:
    """At most `most` of the cell's samples, a 0-d and an empty one among them if there are any; in mode "forward" also
    the first in other layouts: non-contiguous, channels last, with a conj or neg bit, and requiring grad."""
    torch.manual_seed(0)
    if cell.mode == "error":
        for i, error in enumerate(op.error_inputs("cpu")):
            yield Sample(f"error input {i}", _named(op, error.sample_input), error=error)
        return
    (dtype,) = dtypes_named(cell.dtype)
    given = op.sample_inputs("cpu", dtype, requires_grad=_wants_gradients(op, cell, dtype))
    seen = list(itertools.islice(given, _SEEN))
    chosen = _chosen(seen, most)
    for i in chosen:
        yield Sample(f"sample {i}", _named(op, seen[i]), first=i == chosen[0])
    if cell.mode == "forward" and most > 1:
        plain = next((i for i in chosen if any(t.numel() > 1 for t in tensors_in(seen[i].input))), None)
        if plain is not None:
            for name, sample in _layouts(op, seen[plain], dtype):
                yield Sample(f"sample {plain}, {name}", _named(op, sample))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `tree`."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _named(op: OpInfo, sample: SampleInput) -> SampleInput:
    sample.name = op.name
    return sample


def _chosen(seen: list[SampleInput], most: int) -> list[int]:
    if len(seen) <= most:
        return list(range(len(seen)))
    spread = [i * len(seen) // most for i in range(most)]
    if most > 2:
        for place, kind in ((-1, _has_scalar), (-2, _has_empty)):
            if not any(kind(seen[i]) for i in spread):
                spread[place] = next((i for i, sample in enumerate(seen) if kind(sample)), spread[place])
    return sorted(set(spread))


def _has_scalar(sample: SampleInput) -> bool:
    return any(x.dim() == 0 for x in tensors_in(sample.input))


def _has_empty(sample: SampleInput) -> bool:
    return any(x.numel() == 0 for x in tensors_in(sample.input))


def _layouts(op: OpInfo, sample: SampleInput, dtype: torch.dtype) -> Iterator[tuple[str, SampleInput]]:
    inputs = tensors_in(sample.input)
    if any(x.layout != torch.strided for x in inputs):
        return
    yield "non-contiguous", sample.noncontiguous()
    inexact = dtype.is_floating_point or dtype.is_complex
    if dtype.is_complex and op.test_conjugated_samples:
        yield "conj bit", _with_input(sample, lambda x: x.conj_physical().conj() if x.is_complex() else x)
    if inexact and op.test_neg_view:
        yield "neg bit", _with_input(sample, lambda x: torch._neg_view(x.neg()) if x.dtype == dtype else x)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if any(x.dim() in formats and x.numel() > 1 for x in inputs):
        yield (
            "channels last",
            _with_input(sample, lambda x: x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x),
        )
    if inexact and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
        yield (
            "requires grad",
            _with_input(sample, lambda x: x.detach().requires_grad_() if x.dtype == dtype else x),
        )


def _with_input(sample: SampleInput, change: Callable[[torch.Tensor], torch.Tensor]) -> SampleInput:
    """The sample with all tensors of its first argument changed."""
    from torch.testing._internal.opinfo.core import SampleInput

    return SampleInput(
        pytree.tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, sample.input),
        args=tuple(sample.args),
        kwargs=dict(sample.kwargs),
        output_process_fn_grad=sample.output_process_fn_grad,
        broadcasts_input=sample.broadcasts_input,
    )


def _wants_gradients(op: OpInfo, cell: Cell, dtype: torch.dtype) -> bool:
    if cell.mode == "compile":
        return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return cell.mode.startswith("grad")
