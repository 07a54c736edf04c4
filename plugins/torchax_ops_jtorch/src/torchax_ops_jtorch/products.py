"""einsum as one product where there are two operands, and as few as possible where there are more.

Source: https://docs.pytorch.org/docs/stable/generated/torch.einsum.html
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from torchax_core import OpSet
from torchax_ops_jtorch.precision import einsum as contract

__all__ = ["ops"]

ops = OpSet("torchax_ops_jtorch.products", depends_on=torch.get_float32_matmul_precision)


# Decomposed, its products would run in lower precision under autocast.
ops.autocast("lower_precision_fp", ["aten::einsum"])


def _gradients(equation, tensors, *, path=None):
    """Of one operand torch makes a view, which has its own way to gradients."""
    return "vjp" if len(tensors) > 1 else "decompose"


@ops.lowering("aten::einsum", composite_grad=_gradients)
def einsum(equation, tensors, *, path=None):
    """Products of `tensors` summed as the equation says: "bij,bjk->bik", with "..." for further dims.

    tensors: one array per term of the equation; sizes of a letter are equal, or 1, which broadcasts.
    path:    the order of contraction that torch found, as pairs of positions in a row; None: left to JAX.
    returns: an array of the equation's result. NotImplemented for one tensor, of which torch makes a view.
    """
    if len(tensors) < 2:
        return NotImplemented
    terms, result = _terms(equation, [x.ndim for x in tensors])
    sizes: dict[str, int] = {}
    for term, x in zip(terms, tensors, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = sizes.get(letter, 1) if size == 1 else size
    operands = [_without_ones(x, term, sizes) for term, x in zip(terms, tensors, strict=True)]
    spec = ",".join(term for _, term in operands) + "->" + result
    order = "auto" if path is None else [tuple(path[i : i + 2]) for i in range(0, len(path), 2)]
    return contract(spec, *(x for x, _ in operands), optimize=order)


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand, and of the result, the dims behind "..." spelled out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    hidden = [rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(written, ranks, strict=True)]
    taken = set(equation)
    spare = [letter for letter in _LETTERS if letter not in taken][: max(hidden)]
    terms = [t.replace("...", "".join(spare[len(spare) - n :])) for t, n in zip(written, hidden, strict=True)]
    if arrow:
        return terms, right.replace("...", "".join(spare))
    once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
    return terms, "".join(spare) + "".join(once)


_LETTERS = string.ascii_letters + "".join(map(chr, range(0x3B1, 0x3CA)))
"""What dims can be called: more than torch's 52 letters, as an equation may use those up."""


def _without_ones(x: jax.Array, term: str, sizes: dict[str, int]) -> tuple[jax.Array, str]:
    """An operand without the dims of size 1 whose letter has another size elsewhere: they broadcast, in a product, by
    not being there."""
    ones = [i for i, letter in enumerate(term) if x.shape[i] == 1 and sizes[letter] != 1]
    kept = "".join(letter for i, letter in enumerate(term) if i not in ones)
    return jnp.squeeze(x, ones), kept
