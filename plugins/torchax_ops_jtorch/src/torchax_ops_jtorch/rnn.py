"""Recurrent layers kept whole: LSTM, GRU and the simple RNNs, over padded or packed sequences, and their single cells.

torch unrolls them in C++, several ops per time step and layer; here a layer and direction is one lax.scan, so that the
program's size does not grow with the sequence, and the input's share of the gates is one matrix product before it.
Gradients are jax.vjp's.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html, .GRU.html, .RNN.html for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

from torchax_core import OpSet, opmath
from torchax_ops_jtorch.precision import precision

__all__ = ["ops"]

ops = OpSet("torchax_ops_jtorch.rnn", depends_on=torch.get_float32_matmul_precision)

State = tuple[jax.Array, ...]  # (h,), or (h, c) of an LSTM; each (batch, size)


class _Weights(NamedTuple):
    """The parameters of one layer and direction. `gates` is 4 for LSTM, 3 for GRU, 1 for RNN."""

    ih: jax.Array  # (gates * hidden, inputs)
    hh: jax.Array  # (gates * hidden, hidden)
    b_ih: jax.Array | None = None  # (gates * hidden,)
    b_hh: jax.Array | None = None
    hr: jax.Array | None = None  # (projected, hidden): an LSTM with `proj_size`


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias`, summed in float32 for half types and left there."""
    return _product(x, weight.T, bias)


def _product(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight + bias`, likewise."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    out = jnp.matmul(x, weight, precision=precision(), preferred_element_type=dtype)
    return out if bias is None else out + bias


def _turned(w: _Weights) -> _Weights:
    """The weights as steps take them: `hh` and `hr` transposed, once before the loop. A small batch times a transposed
    matrix takes XLA's CPU backend nearly half as long again."""
    return w._replace(hh=w.hh.T, hr=None if w.hr is None else w.hr.T)


# -- one step of each kind -----------------------------------------------------------------------------------------
# The input's share of the gates, `x`, is computed for all steps at once, before the loop, with every bias that can be.


def _lstm_input(inputs: jax.Array, w: _Weights) -> jax.Array:
    gates = _linear(inputs, w.ih, w.b_ih)
    return gates if w.b_hh is None else gates + w.b_hh


def _lstm_step(x: jax.Array, state: State, w: _Weights) -> State:
    h, c = state
    i, f, g, o = jnp.split(x + _product(h, w.hh), 4, axis=-1)
    new_c = jax.nn.sigmoid(f) * opmath(c) + jax.nn.sigmoid(i) * jnp.tanh(g)
    new_h = (jax.nn.sigmoid(o) * jnp.tanh(new_c)).astype(h.dtype)
    if w.hr is not None:
        new_h = _product(new_h, w.hr).astype(h.dtype)
    return new_h, new_c.astype(c.dtype)


def _gru_input(inputs: jax.Array, w: _Weights) -> jax.Array:
    return _linear(inputs, w.ih, w.b_ih)


def _gru_step(x: jax.Array, state: State, w: _Weights) -> State:
    (h,) = state
    x_r, x_z, x_n = jnp.split(x, 3, axis=-1)
    # The reset gate scales the hidden state's share of `n`, its bias included: b_hh cannot join the input's share.
    h_r, h_z, h_n = jnp.split(_product(h, w.hh, w.b_hh), 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * h_n)
    return (((opmath(h) - n) * z + n).astype(h.dtype),)


def _tanh_step(x: jax.Array, state: State, w: _Weights) -> State:
    (h,) = state
    return (jnp.tanh(x + _product(h, w.hh)).astype(h.dtype),)


def _relu_step(x: jax.Array, state: State, w: _Weights) -> State:
    (h,) = state
    return (jax.nn.relu(x + _product(h, w.hh)).astype(h.dtype),)


class _Kind(NamedTuple):
    """A kind of layer: the input's share of the gates, and one step."""

    input: Callable[[jax.Array, _Weights], jax.Array]
    step: Callable[[jax.Array, State, _Weights], State]


_LSTM = _Kind(_lstm_input, _lstm_step)
_GRU = _Kind(_gru_input, _gru_step)
_TANH = _Kind(_lstm_input, _tanh_step)
_RELU = _Kind(_lstm_input, _relu_step)


# -- layers --------------------------------------------------------------------------------------------------------


def _direction(kind: _Kind, w: _Weights, inputs, state: State, valid, reverse: bool) -> tuple[jax.Array, State]:
    """One layer, one direction: inputs (time, batch, size) -> outputs (time, batch, hidden), and the last state.

    valid: (time, batch) bool, or None; where it is False the state stays as it is.
    """
    turned = _turned(w)

    def step(state: State, at) -> tuple[State, jax.Array]:
        x, valid = at
        new = kind.step(x, state, turned)
        if valid is not None:
            new = tuple(jnp.where(valid[:, None], n, old) for n, old in zip(new, state, strict=True))
        return new, new[0]

    state, outputs = jax.lax.scan(step, state, (kind.input(inputs, w), valid), reverse=reverse)
    return outputs, state


def _layers(
    kind: _Kind,
    inputs: jax.Array,
    states: Sequence[jax.Array],
    params: Sequence[jax.Array],
    *,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    key: jax.Array | None,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """All layers: inputs (time, batch, size) -> outputs (time, batch, directions * hidden), and the last states.

    states: each (num_layers * directions, batch, size): layer 0 forward, layer 0 reverse, layer 1 forward, ...
    params: the weights of each in that order, flat: w_ih, w_hh, b_ih, b_hh (if `has_biases`), w_hr (if projected).
    """
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = _weights(params[index * per_cell : (index + 1) * per_cell], has_biases)
            state = tuple(s[index] for s in states)
            output, state = _direction(kind, weights, inputs, state, valid, reverse=direction == 1)
            outputs.append(output)
            last.append(state)
        inputs = jnp.concatenate(outputs, axis=-1) if bidirectional else outputs[0]
        if train and dropout > 0 and layer < num_layers - 1:
            # without dropout there is no key: the kernel draws one only if it is missed here
            kept = jax.random.uniform(jax.random.fold_in(key, layer), inputs.shape, jnp.float32) >= dropout
            scale = 1 / (1 - dropout) if dropout < 1 else 0.0
            inputs = jnp.where(kept, inputs * jnp.asarray(scale, inputs.dtype), 0)
    return inputs, tuple(jnp.stack(s) for s in zip(*last, strict=True))


def _weights(params: Sequence[jax.Array], has_biases: bool) -> _Weights:
    ih, hh, *rest = params
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    return _Weights(ih, hh, b_ih, b_hh, hr=rest[0] if rest else None)


def _padded(kind, input, states, params, batch_first: bool, **settings) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    outputs, last = _layers(kind, jnp.swapaxes(input, 0, 1) if batch_first else input, states, params, **settings)
    return jnp.swapaxes(outputs, 0, 1) if batch_first else outputs, last


def _packed(kind, data, batch_sizes, states, params, **settings) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Layers over a PackedSequence: data (elements, size), step by step, `batch_sizes[t]` rows at step `t`.

    The sequences are laid out as (time, batch), run with a mask, and packed again: the program depends on how many
    steps and sequences there are, not on their lengths.
    """
    ends = jnp.cumsum(batch_sizes)
    starts = ends - batch_sizes
    sequence = jnp.arange(states[0].shape[1])
    valid = sequence < batch_sizes[:, None]
    row = jnp.where(valid, starts[:, None] + sequence, 0)
    outputs, last = _layers(kind, data[row], states, params, valid=valid, **settings)
    element = jnp.arange(data.shape[0])
    step = jnp.searchsorted(ends, element, side="right")
    return outputs[step, element - starts[step]], last


@ops.lowering("aten::lstm.input", static=["dropout"])
def lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, *, key=None):
    """Long short-term memory over padded sequences.

    input:   (time, batch, size), or (batch, time, size) if `batch_first`.
    hx:      [h, c], (layers * directions, batch, hidden); h narrower with `proj_size`.
    params:  as in `_layers`.
    dropout: probability, between layers, if `train`.
    returns: outputs (time, batch, directions * hidden), or batch first; the last h and c in the shapes of `hx`.
    """
    outputs, (h, c) = _padded(
        _LSTM,
        input,
        hx,
        params,
        batch_first,
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        key=key,
    )
    return outputs, h, c


@ops.lowering("aten::lstm.data", static=["dropout"])
def lstm_packed(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional, *, key=None):
    """`lstm` over a PackedSequence.

    data:    (elements, size); batch_sizes: (time,), rows of `data` per step; hx and params as in `lstm`.
    returns: outputs (elements, directions * hidden); the last h and c.
    """
    outputs, (h, c) = _packed(
        _LSTM,
        data,
        batch_sizes,
        hx,
        params,
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        key=key,
    )
    return outputs, h, c


def _register_single_state(name: str, kind: _Kind) -> None:
    """`aten::<name>.input` and `.data`: layers whose state is h alone."""

    @ops.lowering(f"aten::{name}.input", static=["dropout"])
    def layers(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, *, key=None):
        outputs, (h,) = _padded(
            kind,
            input,
            (hx,),
            params,
            batch_first,
            has_biases=has_biases,
            num_layers=num_layers,
            dropout=dropout,
            train=train,
            bidirectional=bidirectional,
            key=key,
        )
        return outputs, h

    @ops.lowering(f"aten::{name}.data", static=["dropout"])
    def packed(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional, *, key=None):
        outputs, (h,) = _packed(
            kind,
            data,
            batch_sizes,
            (hx,),
            params,
            has_biases=has_biases,
            num_layers=num_layers,
            dropout=dropout,
            train=train,
            bidirectional=bidirectional,
            key=key,
        )
        return outputs, h


for _name, _kind in {"gru": _GRU, "rnn_tanh": _TANH, "rnn_relu": _RELU}.items():
    _register_single_state(_name, _kind)

# Decomposed, their matrix products would run in lower precision under autocast; whole, all of the layer does.
ops.autocast(
    "lower_precision_fp",
    [f"aten::{_name}.{_form}" for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for _form in ("input", "data")],
)


# -- single cells --------------------------------------------------------------------------------------------------


def _one_step(kind: _Kind, input, state: State, w_ih, w_hh, b_ih, b_hh) -> State:
    w = _Weights(w_ih, w_hh, b_ih, b_hh)
    return kind.step(kind.input(input, w), state, _turned(w))


@ops.lowering("aten::lstm_cell")
def lstm_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of an LSTM: input (batch, size), hx [h, c] -> (h, c), each (batch, hidden)."""
    return _one_step(_LSTM, input, tuple(hx), w_ih, w_hh, b_ih, b_hh)


@ops.lowering("aten::gru_cell")
def gru_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of a GRU: input (batch, size), hx (batch, hidden) -> (batch, hidden)."""
    return _one_step(_GRU, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@ops.lowering("aten::rnn_tanh_cell")
def rnn_tanh_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of a simple RNN with tanh: input (batch, size), hx (batch, hidden) -> (batch, hidden)."""
    return _one_step(_TANH, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@ops.lowering("aten::rnn_relu_cell")
def rnn_relu_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """As `rnn_tanh_cell`, with relu."""
    return _one_step(_RELU, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]
