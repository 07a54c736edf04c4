"""What each op runs in under `torch.autocast("jax", dtype=...)`: torch's own lists for its accelerators.

Source: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
"""

from __future__ import annotations

from torchax_core import OpSet

ops = OpSet("torchax_ops_aten.autocast")

# The work is in matrix products, which are fast and accurate enough in half types.
ops.autocast(
    "lower_precision_fp",
    [
        "aten::addbmm",
        "aten::addmm",
        "aten::addmv",
        "aten::addr",
        "aten::baddbmm",
        "aten::bmm",
        "aten::chain_matmul",
        "aten::conv1d",
        "aten::conv1d.padding",
        "aten::conv2d",
        "aten::conv2d.padding",
        "aten::conv3d",
        "aten::conv3d.padding",
        "aten::conv_tbc",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d.input",
        "aten::conv_transpose3d.input",
        "aten::convolution",
        "aten::gru_cell",
        "aten::linalg_multi_dot",
        "aten::linalg_vecdot",
        "aten::linear",
        "aten::lstm_cell",
        "aten::matmul",
        "aten::mm",
        "aten::mv",
        "aten::prelu",
        "aten::rnn_relu_cell",
        "aten::rnn_tanh_cell",
        "aten::scaled_dot_product_attention",
    ],
)

# Large sums, small differences, powers: half types overflow or lose too much.
ops.autocast(
    "fp32",
    [
        "aten::acos",
        "aten::asin",
        "aten::binary_cross_entropy_with_logits",
        "aten::cdist",
        "aten::cosh",
        "aten::cosine_embedding_loss",
        "aten::cosine_similarity",
        "aten::cumprod",
        "aten::cumsum",
        "aten::dist",
        "aten::erfinv",
        "aten::exp",
        "aten::expm1",
        "aten::group_norm",
        "aten::hinge_embedding_loss",
        "aten::huber_loss",
        "aten::kl_div",
        "aten::l1_loss",
        "aten::layer_norm",
        "aten::log",
        "aten::log10",
        "aten::log1p",
        "aten::log2",
        "aten::log_softmax.int",
        "aten::logsumexp",
        "aten::margin_ranking_loss",
        "aten::mse_loss",
        "aten::multi_margin_loss",
        "aten::multilabel_margin_loss",
        "aten::nll_loss",
        "aten::nll_loss2d",
        "aten::norm.Scalar",
        "aten::norm.ScalarOpt_dim",
        "aten::nuclear_norm",
        "aten::pdist",
        "aten::poisson_nll_loss",
        "aten::pow.Scalar",
        "aten::pow.Tensor_Scalar",
        "aten::pow.Tensor_Tensor",
        "aten::prod",
        "aten::prod.dim_int",
        "aten::reciprocal",
        "aten::renorm",
        "aten::rsqrt",
        "aten::sinh",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::softmax.int",
        "aten::softmin",
        "aten::softplus",
        "aten::sum",
        "aten::sum.dim_IntList",
        "aten::tan",
        "aten::triplet_margin_loss",
    ],
)

# Several inputs that must agree: the widest of them.
ops.autocast(
    "promote",
    [
        "aten::addcdiv",
        "aten::addcmul",
        "aten::atan2",
        "aten::bilinear",
        "aten::cat",
        "aten::cross",
        "aten::dot",
        "aten::grid_sampler",
        "aten::index_copy",
        "aten::index_put",
        "aten::scatter_add",
        "aten::stack",
        "aten::tensordot",
        "aten::vdot",
    ],
)
