"""Nested containers of torch's pytree and of jax's at once: a Hugging Face output in a list in an optax state.

Each library knows containers the other has never heard of. `flatten` opens both kinds, whichever is outermost.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

__all__ = ["PLAIN", "Spec", "flatten", "map_leaves", "unflatten"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The structure of a tree: torch's, and jax's in the leaves of it that jax can open (`inner`, by position)."""

    outer: Any
    inner: tuple[tuple[int, Any, tuple[Spec, ...]], ...]


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of `tree` and its structure. Dicts keep their order; None is a leaf; so is a callable, whatever it holds."""
    if isinstance(tree, PLAIN):
        return [tree], _LEAF
    outer, spec = pytree.tree_flatten(tree)
    leaves: list[Any] = []
    inner = []
    for position, leaf in enumerate(outer):
        if not _may_open(leaf):
            leaves.append(leaf)
            continue
        parts, treedef = jax.tree.flatten(leaf, is_leaf=lambda x, top=leaf: x is not top and not _may_open(x))
        if jax.tree_util.treedef_is_leaf(treedef) and len(parts) == 1:
            leaves.append(leaf)
            continue
        specs = []
        for part in parts:
            sub_leaves, sub = flatten(part)
            leaves += sub_leaves
            specs.append(sub)
        inner.append((position, treedef, tuple(specs)))
    return leaves, Spec(spec, tuple(inner))


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The tree of that structure with these leaves."""
    if spec is _LEAF and len(leaves) == 1:
        return leaves[0]
    rest = iter(leaves)
    tree = _build(rest, spec)
    if next(rest, rest) is not rest:
        raise ValueError(f"{len(leaves)} leaves are more than the structure {spec} has places for.")
    return tree


def map_leaves(function: Any, tree: Any) -> Any:
    """`tree` with `function` applied to every leaf."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec)


def _build(leaves: Any, spec: Spec) -> Any:
    opened = {position: (treedef, specs) for position, treedef, specs in spec.inner}
    outer = []
    for position in range(spec.outer.num_leaves):
        if position in opened:
            treedef, specs = opened[position]
            outer.append(jax.tree.unflatten(treedef, [_build(leaves, s) for s in specs]))
        else:
            outer.append(next(leaves))
    return pytree.tree_unflatten(outer, spec.outer)


_LEAF = Spec(pytree.tree_flatten(0)[1], ())
PLAIN = (torch.Tensor, jax.Array, jax.core.Tracer, bool, int, float, complex, str, bytes, type(None))
"""Types that are leaves at first sight."""


def _may_open(leaf: Any) -> bool:
    return not isinstance(leaf, PLAIN) and not callable(leaf)
