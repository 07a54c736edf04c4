"""torch.nn.SyncBatchNorm in a traced function: batch norm over the batches of all members of a group.

torch's own asks for values: it drops the members whose batch is empty. Here they count as nothing, and gradients are those of the
ops, collectives among them.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules._functions import SyncBatchNorm

from torchax_core import customs

__all__ = ["install", "sync_batch_norm"]


def install() -> None:
    """Let SyncBatchNorm be this one while a function is traced."""
    customs.put(SyncBatchNorm, sync_batch_norm)


def sync_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    eps: float,
    momentum: float,
    process_group: Any,
    world_size: int,
) -> torch.Tensor:
    """`input`, (N, C, ...), normalised by the mean and variance of each channel over all members' inputs; N may differ, and be 0.

    weight, bias, running_mean, running_var: (C,); the last two are moved by `momentum` towards what was found. Half precision is
    computed in float32. Returns the shape and dtype of `input`.
    """
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    channels, dims = x.shape[1], [d for d in range(x.dim()) if d != 1]
    count = x.numel() // channels
    if count:
        found = [x.mean(dims), x.var(dims, correction=0)]
    else:
        found = [x.sum(dims), x.sum(dims)]
    mine = torch.cat([*found, x.new_full((1,), count)])
    gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor
    everyone = gather(mine[None], world_size, process_group.group_name)
    means, variances, counts = everyone.split([channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    shape = [1, channels, *[1] * (x.dim() - 2)]
    result = (x - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        result = result * weight.to(x.dtype).view(shape)
    if bias is not None:
        result = result + bias.to(x.dtype).view(shape)
    return result.to(input.dtype)
