"""The fused cells that torch makes an LSTM and a GRU of on accelerators, one time step each, with their backwards.

`nn.LSTMCell` and `nn.GRUCell` arrive as these, and so does every step of `nn.LSTM` and `nn.GRU`, unless a pack keeps the
layers whole. The matrix products have been done before: a cell gets the input's and the hidden state's share of the gates.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html and .GRU.html for the formulas.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath

ops = OpSet("torchax_ops_aten.rnn")


def _with_bias(gates: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`gates + bias` in the compute type."""
    return opmath(gates) if bias is None else opmath(gates) + opmath(bias)


# -- LSTM ------------------------------------------------------------------------------------------------------------


@ops.lowering("aten::_thnn_fused_lstm_cell")
def _thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """One step of an LSTM from its gates before activation.

    input_gates, hidden_gates: (batch, 4 * hidden), of i, f, g, o in this order; the biases (4 * hidden,) or None.
    cx:      (batch, hidden).
    returns: hy and cy (batch, hidden), and the activated gates (batch, 4 * hidden), which the backward wants.
    """
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cy = f * opmath(cx) + i * g
    return o * jnp.tanh(cy), cy, jnp.concatenate([i, f, g, o], axis=-1)


@ops.lowering("aten::_thnn_fused_lstm_cell_backward_impl")
def _thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """Gradients of `_thnn_fused_lstm_cell` for its gates, `cx` and the biases (None unless `has_bias`).

    grad_hy, grad_cy: (batch, hidden), None for one that nothing depends on.
    """
    i, f, g, o = jnp.split(opmath(workspace), 4, axis=-1)
    tanh_cy = jnp.tanh(opmath(cy))
    grad_h = jnp.zeros_like(tanh_cy) if grad_hy is None else opmath(grad_hy)
    grad_c = grad_h * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        grad_c += opmath(grad_cy)
    grad_gates = jnp.concatenate(
        [
            grad_c * g * i * (1 - i),
            grad_c * opmath(cx) * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh_cy * o * (1 - o),
        ],
        axis=-1,
    )
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


# -- GRU -------------------------------------------------------------------------------------------------------------


@ops.lowering("aten::_thnn_fused_gru_cell")
def _thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """One step of a GRU from its gates before activation.

    input_gates, hidden_gates: (batch, 3 * hidden), of r, z, n in this order; the biases (3 * hidden,) or None.
    hx:      (batch, hidden).
    returns: hy (batch, hidden), and what the backward wants, (batch, 5 * hidden): r, z, n, hx, and the hidden state's
             share of n before r scales it.
    """
    x_r, x_z, x_n = jnp.split(_with_bias(input_gates, input_bias), 3, axis=-1)
    h_r, h_z, h_n = jnp.split(_with_bias(hidden_gates, hidden_bias), 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * h_n)
    h = opmath(hx)
    return n + z * (h - n), jnp.concatenate([r, z, n, h, h_n], axis=-1)


@ops.lowering("aten::_thnn_fused_gru_cell_backward")
def _thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias):
    """Gradients of `_thnn_fused_gru_cell` for input_gates, hidden_gates, `hx` and the two biases (None unless
    `has_bias`)."""
    r, z, n, h, h_n = jnp.split(opmath(workspace), 5, axis=-1)
    grad = opmath(grad_hy)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (h - n) * z * (1 - z)
    grad_r = grad_n * h_n * r * (1 - r)
    of_input = jnp.concatenate([grad_r, grad_z, grad_n], axis=-1)
    of_hidden = jnp.concatenate([grad_r, grad_z, grad_n * r], axis=-1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * z, *biases
