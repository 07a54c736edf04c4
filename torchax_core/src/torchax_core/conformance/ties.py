"""Indices of equal elements: torch promises an order among them only of stable sorts, so any of them is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["ties_settled"]

# Where `dim` stands among the arguments after the input, and what it is if it is not given.
_DIM = {"sort": (0, -1), "argsort": (0, -1), "topk": (1, -1), "kthvalue": (1, -1)}


def ties_settled(op: OpInfo, sample: SampleInput, actual: Any, expected: Any, *, batched: bool = False) -> Any:
    """`actual` with torch's indices in the place of others that name equal elements, each once along the dimension.

    batched: the results have a first dimension more, of vmap over inputs of one order.
    """
    x = sample.input
    if op.name not in _DIM or sample.kwargs.get("stable") or not isinstance(x, torch.Tensor) or x.dim() == 0:
        return actual
    place, default = _DIM[op.name]
    given = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", default)
    x, dim = x.detach(), int(given) % x.dim()

    leaves, tree = pytree.tree_flatten(actual)
    theirs = pytree.tree_leaves(expected)
    if not leaves or len(leaves) != len(theirs):
        return actual
    parts = [(leaves[-1], theirs[-1])]
    if batched and leaves[-1].shape == theirs[-1].shape:
        parts = list(zip(leaves[-1], theirs[-1], strict=True))
    if all(_equally_right(x, dim, one, other) for one, other in parts):
        leaves[-1] = theirs[-1].to(leaves[-1].device)
    return pytree.tree_unflatten(leaves, tree)


def _equally_right(x: torch.Tensor, dim: int, ours: Any, theirs: Any) -> bool:
    if (
        not all(isinstance(i, torch.Tensor) and i.dtype is torch.int64 for i in (ours, theirs))
        or ours.shape != theirs.shape
    ):
        return False
    ours = ours.detach().cpu()
    if ours.dim() < x.dim():
        ours, theirs = ours.unsqueeze(dim), theirs.unsqueeze(dim)
    if not bool(((ours >= 0) & (ours < x.shape[dim])).all()):
        return False
    once = bool((ours.sort(dim).values.diff(dim=dim) != 0).all())
    one, two = x.gather(dim, ours), x.gather(dim, theirs)
    return once and bool(((one == two) | ((one != one) & (two != two))).all())
