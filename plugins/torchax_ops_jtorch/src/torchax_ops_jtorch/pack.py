"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_OPS = (
    "aten::gru.data",
    "aten::gru.input",
    "aten::gru_cell",
    "aten::lstm.data",
    "aten::lstm.input",
    "aten::lstm_cell",
    "aten::rnn_relu.data",
    "aten::rnn_relu.input",
    "aten::rnn_relu_cell",
    "aten::rnn_tanh.data",
    "aten::rnn_tanh.input",
    "aten::rnn_tanh_cell",
)


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    from torchax_ops_jtorch import rnn

    return [rnn.ops]
