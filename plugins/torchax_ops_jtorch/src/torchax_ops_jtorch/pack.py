"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

from torchax_core import OpSet, hookimpl
from torchax_ops_jtorch import higher_order

TORCHAX_PACK_API = 1
TORCHAX_BEFORE = ("aten",)  # which has attention as well, but in one piece
TORCHAX_OPS = (
    "aten::cross_entropy_loss",
    "aten::einsum",
    "aten::gru.data",
    "aten::gru.input",
    "aten::gru_cell",
    "aten::lstm.data",
    "aten::lstm.input",
    "aten::lstm_cell",
    "aten::one_hot",
    "aten::rnn_relu.data",
    "aten::rnn_relu.input",
    "aten::rnn_relu_cell",
    "aten::rnn_tanh.data",
    "aten::rnn_tanh.input",
    "aten::rnn_tanh_cell",
    "aten::scaled_dot_product_attention",
    "higher_order::flex_attention",  # no op of a schema, and so this module is imported to register it
)

higher_order.register()


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    from torchax_ops_jtorch import attention, classes, products, rnn

    return [attention.ops, classes.ops, products.ops, rnn.ops]
