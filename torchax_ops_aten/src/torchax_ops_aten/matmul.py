"""Products of matrices and vectors: mm, bmm, addmm, mv, dot, linear and their kin.

Half types multiply as they are and accumulate in float32 (`preferred_element_type`); the kernel rounds once. float32
products follow `torch.get_float32_matmul_precision()`, read when an op is traced. Integers are exact.
`einsum`, `tensordot` and `bilinear` are composite and arrive here as these ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from torchax_core.opset import OpSet
from torchax_core.promotion import SAME, opmath

ops = OpSet("torchax_ops_aten.matmul", depends_on=torch.get_float32_matmul_precision)

_ADDED = SAME.of("self", "beta", "alpha")
"""What is added, and its factors, come in one type; the matrices stay in theirs, which the hardware may multiply in."""

_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}

Axes = tuple[Sequence[int], Sequence[int]]


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """How exactly products of `dtype` are computed: the user's choice for float32, else the type's own arithmetic."""
    if dtype in (jnp.float32, jnp.complex64):
        return _PRECISION[torch.get_float32_matmul_precision()]
    return jax.lax.Precision.DEFAULT


def product(a: jax.Array, b: jax.Array, contract: Axes, batch: Axes = ((), ())) -> jax.Array:
    """`dot_general` over the axes `contract`, batched over `batch`; half types give float32."""
    if a.dtype == jnp.bool_:
        raise RuntimeError("aten::mm and its kin are not defined for bool tensors; convert them to an integer type.")
    preferred = opmath(a).dtype
    return jax.lax.dot_general(
        a, b, (contract, batch), precision=precision_for(a.dtype), preferred_element_type=preferred
    )


def _rows_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over all rows of their outer products: (..., n), (..., m) -> (n, m).

    XLA's CPU backend copies both operands into another order if there is more than one axis to contract. Elsewhere that is
    a matter of layout, and separate axes keep their shardings.
    """
    if jax.default_backend() == "cpu":
        a, b = a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b.reshape(math.prod(b.shape[:-1]), b.shape[-1])
    rows = tuple(range(a.ndim - 1))
    return product(a, b, (rows, rows))


def _scaled(x: jax.Array, factor: jax.Array | int, *, ignore_zero: bool = False) -> jax.Array:
    """`factor * x`; with `ignore_zero`, a factor of 0 gives 0 whatever `x` holds, as BLAS has it for `beta`."""
    if isinstance(factor, int) and factor == 1:
        return x
    factor = jnp.asarray(factor).astype(x.dtype)
    scaled = factor * x
    return jnp.where(factor == 0, jnp.zeros_like(scaled), scaled) if ignore_zero else scaled


def _added(self: jax.Array, x: jax.Array, beta: jax.Array | int, alpha: jax.Array | int) -> jax.Array:
    """`beta * self + alpha * x`, in the dtype of `x`."""
    return _scaled(self.astype(x.dtype), beta, ignore_zero=True) + _scaled(x, alpha)


@ops.lowering("aten::mm")
def mm(self, mat2):
    """`self @ mat2`: (n, k) @ (k, m) -> (n, m)."""
    return product(self, mat2, ((1,), (0,)))


@ops.lowering("aten::mm.dtype")
def mm_dtype(self, mat2, out_dtype):
    """`mm` with the result in `out_dtype`, rounded once."""
    return mm(self, mat2).astype(out_dtype)


@ops.lowering("aten::bmm")
def bmm(self, mat2):
    """`self @ mat2` for each of a batch: (b, n, k) @ (b, k, m) -> (b, n, m)."""
    return product(self, mat2, ((2,), (1,)), ((0,), (0,)))


@ops.lowering("aten::bmm.dtype")
def bmm_dtype(self, mat2, out_dtype):
    """`bmm` with the result in `out_dtype`, rounded once."""
    return bmm(self, mat2).astype(out_dtype)


@ops.lowering("aten::addmm", promote=_ADDED)
def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    """`beta * self + alpha * mat1 @ mat2`; `self` broadcasts to (n, m), and is not read where `beta` is 0."""
    return _added(self, mm(mat1, mat2), beta, alpha)


@ops.lowering("aten::addmm.dtype", promote=_ADDED)
def addmm_dtype(self, mat1, mat2, out_dtype, *, beta=1, alpha=1):
    """`addmm` with the result in `out_dtype`, rounded once."""
    return addmm(self, mat1, mat2, beta=beta, alpha=alpha).astype(out_dtype)


@ops.lowering("aten::_addmm_activation", promote=_ADDED)
def _addmm_activation(self, mat1, mat2, *, beta=1, alpha=1, use_gelu=False):
    """`addmm` followed by relu, or by the tanh form of gelu, before rounding.

    source: the CPU kernel calls `gelu` in its exact form; `torch._decomp` and this follow it.
    """
    out = addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return jax.nn.gelu(out, approximate=False) if use_gelu else jax.nn.relu(out)


@ops.lowering("aten::baddbmm", promote=_ADDED)
def baddbmm(self, batch1, batch2, *, beta=1, alpha=1):
    """`beta * self + alpha * batch1 @ batch2`; `self` broadcasts to (b, n, m), and is not read where `beta` is 0."""
    return _added(self, bmm(batch1, batch2), beta, alpha)


@ops.lowering("aten::baddbmm.dtype", promote=_ADDED)
def baddbmm_dtype(self, batch1, batch2, out_dtype, *, beta=1, alpha=1):
    """`baddbmm` with the result in `out_dtype`, rounded once."""
    return baddbmm(self, batch1, batch2, beta=beta, alpha=alpha).astype(out_dtype)


@ops.lowering("aten::addbmm", promote=_ADDED)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    """`beta * self + alpha * sum_b batch1[b] @ batch2[b]`: (b, n, k), (b, k, m) -> (n, m)."""
    return _added(self, product(batch1, batch2, ((0, 2), (0, 1))), beta, alpha)


# torch's gradients of the next three multiply by a transposed matrix, which XLA on CPU copies first when a vector comes
# after it, and does so element by element: in up to twenty times the time of jax's gradients, which contract the other axis
@ops.lowering("aten::mv", differentiable=True)
def mv(self, vec):
    """`self @ vec`: (n, k) @ (k,) -> (n,)."""
    return product(self, vec, ((1,), (0,)))


@ops.lowering("aten::addmv", promote=_ADDED, differentiable=True)
def addmv(self, mat, vec, *, beta=1, alpha=1):
    """`beta * self + alpha * mat @ vec`; `self` broadcasts to (n,), and is not read where `beta` is 0."""
    return _added(self, mv(mat, vec), beta, alpha)


@ops.lowering("aten::addr", promote=SAME, differentiable=True)
def addr(self, vec1, vec2, *, beta=1, alpha=1):
    """`beta * self + alpha * vec1[:, None] * vec2`; `self` broadcasts to (n, m), and is not read where `beta` is 0."""
    return _added(self, vec1[:, None] * vec2, beta, alpha)


@ops.lowering("aten::dot")
def dot(self, tensor):
    """The sum of `self * tensor`: (k,), (k,) -> (). Not conjugated; see `vdot`."""
    return product(self, tensor, ((0,), (0,)))


@ops.lowering("aten::vdot")
def vdot(self, other):
    """The sum of `conj(self) * other`: (k,), (k,) -> ()."""
    return product(jnp.conj(self), other, ((0,), (0,)))


@ops.lowering("aten::_int_mm")
def _int_mm(self, mat2):
    """int8 (n, k) @ (k, m), accumulated and returned in int32."""
    return jax.lax.dot_general(self, mat2, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def _grad_of_linear(input, weight, bias=None):
    """torch's formula is for real matrices; for a vector among them its meta kernel gives other shapes."""
    return "formula" if weight.dim() == 2 and input.dim() > 1 and not input.is_complex() else "decompose"


@ops.lowering("aten::linear", composite_grad=_grad_of_linear)
def linear(input, weight, bias=None):
    """`input @ weight.T + bias`, kept whole: one product, no transposed copy.

    input:   (..., k);  weight: (m, k) or (k,);  bias: (m,) or () or None.
    returns: (..., m), or (...) for a one-dimensional `weight`.
    """
    out = product(input, weight, ((input.ndim - 1,), (weight.ndim - 1,)))
    return out if bias is None else out + bias.astype(out.dtype)


@ops.lowering("aten::linear_backward")
def linear_backward(self, grad_output, weight, output_mask):
    """Gradients of `linear`: of the input, the weight (m, k) and the bias (m,), None where not asked for.

    As torch's meta kernel has it, the latter two come together.
    source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear.html
    """
    wants_input, *wants_others = output_mask
    grad_input = product(grad_output, jnp.conj(weight), ((grad_output.ndim - 1,), (0,))) if wants_input else None
    if not any(wants_others):
        return grad_input, None, None
    grad_weight = _rows_product(grad_output, jnp.conj(self))
    return grad_input, grad_weight, jnp.sum(opmath(grad_output), tuple(range(grad_output.ndim - 1)))


def _grad_of_matmul(self, other):
    """torch has a formula for real operands alone."""
    return "decompose" if self.is_complex() else "formula"


@ops.lowering("aten::matmul", composite_grad=_grad_of_matmul)
def matmul(self, other):
    """Products of matrices over broadcast batch dims, kept whole: no expanded copies, no reshapes.

    self: (k,) or (..., n, k);  other: (k,) or (..., k, m).  A vector's dim is dropped from the result.
    source: https://docs.pytorch.org/docs/stable/generated/torch.matmul.html
    """
    if other.ndim <= 2:
        return product(self, other, ((self.ndim - 1,), (max(other.ndim - 2, 0),)))
    if self.ndim == 1:
        return product(other, self, ((other.ndim - 2,), (0,)))
    if self.shape[:-2] == other.shape[:-2]:
        batch = tuple(range(other.ndim - 2))
        return product(self, other, ((self.ndim - 1,), (other.ndim - 2,)), (batch, batch))
    preferred = opmath(self).dtype
    return jnp.matmul(self, other, precision=precision_for(self.dtype), preferred_element_type=preferred)


@ops.lowering("aten::matmul_backward", differentiable=True)
def matmul_backward(grad, self, other, mask):
    """Gradients of `matmul`, in the dtypes of what they are of; None where not asked for.

    grad: as `matmul(self, other)`.
    """
    found = _matmul_gradients(grad, jnp.conj(self), jnp.conj(other), *mask)
    return tuple(None if g is None else g.astype(x.dtype) for g, x in zip(found, (self, other), strict=True))


def _matmul_gradients(grad, self, other, wants_self, wants_other):
    if self.ndim == other.ndim == 1:
        return (grad * other if wants_self else None), (grad * self if wants_other else None)
    if self.ndim == 1:  # (k,) @ (..., k, m) -> (..., m)
        leading = tuple(range(grad.ndim - 1))
        grad_self = product(grad, other, ((*leading, grad.ndim - 1), (*leading, grad.ndim)))
        grad_other = self[:, None] * grad[..., None, :]
        return (grad_self if wants_self else None), (grad_other if wants_other else None)
    if other.ndim == 1:  # (..., n, k) @ (k,) -> (..., n)
        rows = tuple(range(grad.ndim))
        grad_self = grad[..., None] * other
        return (grad_self if wants_self else None), (product(self, grad, (rows, rows)) if wants_other else None)
    if other.ndim == 2:  # (..., n, k) @ (k, m): one large product each
        grad_self = product(grad, other, ((grad.ndim - 1,), (1,))) if wants_self else None
        return grad_self, _rows_product(self, grad) if wants_other else None
    grad_self = matmul(grad, jnp.swapaxes(other, -1, -2)) if wants_self else None
    grad_other = matmul(jnp.swapaxes(self, -1, -2), grad) if wants_other else None
    return (
        None if grad_self is None else _summed_to(grad_self, self.shape),
        None if grad_other is None else _summed_to(grad_other, other.shape),
    )


def _summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` summed over the dims that broadcasting gave it over `shape`."""
    new = x.ndim - len(shape)
    widened = tuple(i for i in range(new, x.ndim) if shape[i - new] == 1 and x.shape[i] != 1)
    return jnp.sum(x, (*range(new), *widened), keepdims=True).reshape(shape) if new or widened else x


@ops.lowering("aten::_trilinear")
def _trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """The sum over `sumdim` of `i1 * i2 * i3`, each first unsqueezed at its `expand` dims: the core of `bilinear`.

    One einsum, so that XLA contracts pairwise; torch loops over `unroll_dim`, which changes no result.
    """
    ndim = i1.ndim + len(expand1)
    summed = {dim % ndim for dim in sumdim}
    # Size-1 dims broadcast in the product; einsum wants them dropped, and put back where no operand has the full size.
    operands, used = [], set()
    for operand, expand in ((i1, expand1), (i2, expand2), (i3, expand3)):
        expanded = {dim % ndim for dim in expand}
        kept = [dim for dim in range(ndim) if dim not in expanded]
        operands += [opmath(operand), kept]
        used |= set(kept)
    dims = [dim for dim in range(ndim) if dim not in summed]
    out = jnp.einsum(*operands, [dim for dim in dims if dim in used], precision=precision_for(operands[0].dtype))
    return jnp.expand_dims(out, [place for place, dim in enumerate(dims) if dim not in used])


# -- products with scales or groups ------------------------------------------------------------------


@ops.lowering("aten::_weight_int8pack_mm")
def _weight_int8pack_mm(self, mat2, scales):
    """A float input and a quantized weight: (n, k) @ (m, k).T * scales, with int8 `mat2` and (m,) `scales`."""
    return product(self, mat2.astype(self.dtype), ((1,), (1,))) * opmath(scales)


@ops.lowering("aten::_scaled_mm", promote=SAME.of("scale_a", "scale_b"))
def _scaled_mm(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """`(scale_a * self) @ (scale_b * mat2) + bias` of float8 matrices: (n, k) @ (k, m) -> (n, m).

    scale_a, scale_b: one number each, or one a row, (n, 1), and one a column, (1, m).
    """
    # Every float8 is a bfloat16; XLA finds the float8 product in this where the hardware has one.
    out = product(self.astype(jnp.bfloat16), mat2.astype(jnp.bfloat16), ((1,), (0,))) * scale_a * scale_b
    out = out if bias is None else out + bias
    return out if scale_result is None else out * scale_result


@ops.lowering("aten::_grouped_mm")
def _grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    """Products of groups of rows, columns or summands, as in a mixture of experts; `offs` (g,) says where each ends.

    (n, k), (g, k, m) -> (n, m):      rows of `self` in groups, each with its own matrix.
    (g, n, k), (k, m) -> (n, m):      columns of `mat2` in groups, each with its own matrix.
    (n, k), (k, m)    -> (g, n, m):   summands in groups, one product each.
    (g, n, k), (g, k, m) -> (g, n, m): no groups to find.
    """
    if self.ndim == 3 and mat2.ndim == 3:
        return bmm(self, mat2)
    options = {"precision": precision_for(self.dtype), "preferred_element_type": opmath(self).dtype}
    sizes = jnp.diff(offs, prepend=0)
    if mat2.ndim == 3:
        return jax.lax.ragged_dot(self, mat2, sizes, **options)
    if self.ndim == 3:
        return jax.lax.ragged_dot(mat2.T, self.swapaxes(1, 2), sizes, **options).T
    contract = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(self, mat2, sizes, contract, **options)
