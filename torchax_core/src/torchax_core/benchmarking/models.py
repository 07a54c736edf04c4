"""The models that `model.py` and `train.py` time, each twice: as a torch module, and as JAX written by hand.

The JAX versions are what a JAX user would write: parameters in a dict, weights stored as (in, out) so that a layer
is `x @ w + b`, `jax.nn` where it has the function, no library above it. They compute the same thing from the same
weights (`gpt_params`, `resnet_params`), in the same shapes and dtypes, and `model.py` checks that before it times
anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of the GPT: 4 layers, 256 wide."""

    vocabulary: int = 1024
    length: int = 64
    width: int = 256
    layers: int = 4
    heads: int = 8
    batch: int = 4


# -- GPT in torch ----------------------------------------------------------------------------------


class Block(nn.Module):
    """One transformer layer, (N, T, C) to (N, T, C): causal attention, then an MLP, each on normed inputs."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """(N, T) tokens to (N, T, vocabulary) logits; the head shares the embedding's weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def gpt_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of predicting each token from those before it; tokens (N, T + 1)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# -- GPT in JAX ------------------------------------------------------------------------------------


def array(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor as a jax array of its own."""
    return jnp.array(tensor.detach().numpy())


def linear_params(layer: nn.Linear) -> Params:
    """A linear layer's weights as JAX stores them, (in, out)."""
    return {"w": array(layer.weight.T), "b": array(layer.bias)}


def norm_params(layer: nn.Module) -> Params:
    """The scale and shift of a norm layer."""
    return {"scale": array(layer.weight), "shift": array(layer.bias)}


def block_params(block: nn.Module) -> Params:
    """The weights of one transformer layer."""
    linears = {name: linear_params(getattr(block, name)) for name in ("qkv", "project", "up", "down")}
    return {"norm1": norm_params(block.norm1), "norm2": norm_params(block.norm2), **linears}


def gpt_params(model: GPT) -> Params:
    """The weights of a GPT on CPU, for `gpt_jax`."""
    return {
        "tokens": array(model.tokens.weight),
        "positions": array(model.positions),
        "norm": norm_params(model.norm),
        "blocks": [block_params(block) for block in model.blocks],
    }


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """(..., in), (in, out) to (..., out), as one product of matrices: XLA's CPU is bad at a batched one's gradient."""
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)


def linear(params: Params, x: jax.Array) -> jax.Array:
    """(..., in) to (..., out)."""
    return matmul(x, params["w"]) + params["b"]


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the last axis, then scale and shift."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["shift"]


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = True) -> jax.Array:
    """Softmax attention, (N, H, T, D) each."""
    scores = jnp.einsum("nhqd,nhkd->nhqk", query, key) * query.shape[-1] ** -0.5
    if causal:
        length = query.shape[-2]
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores, axis=-1), value)


def block_jax(params: Params, x: jax.Array, heads: int) -> jax.Array:
    """`Block.forward`."""
    n, t, c = x.shape
    qkv = linear(params["qkv"], layer_norm(params["norm1"], x)).reshape(n, t, 3, heads, c // heads)
    query, key, value = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    mixed = attention(query, key, value)
    x = x + linear(params["project"], mixed.transpose(0, 2, 1, 3).reshape(n, t, c))
    return x + linear(
        params["down"], jax.nn.gelu(linear(params["up"], layer_norm(params["norm2"], x)), approximate=True)
    )


def gpt_jax(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """`GPT.forward`."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        x = block_jax(block, x, heads)
    return matmul(layer_norm(params["norm"], x), params["tokens"].T)


def gpt_loss_jax(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """`gpt_loss`."""
    logits = gpt_jax(params, tokens[:, :-1], heads)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


# -- a small ResNet --------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut; a stride halves the image and a 1x1 shortcut follows it."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


RESNET_CHANNELS = (16, 32, 64)
RESNET_STRIDES = (1, 1, 2, 1, 2, 1)


class ResNet(nn.Module):
    """(N, 3, 32, 32) images to (N, 10) logits: three stages of two residual blocks, 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, RESNET_CHANNELS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(RESNET_CHANNELS[0])
        widths = [width for width in RESNET_CHANNELS for _ in range(2)]
        sizes = zip([RESNET_CHANNELS[0], *widths[:-1]], widths, RESNET_STRIDES, strict=True)
        self.blocks = nn.ModuleList([Residual(*size) for size in sizes])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def batch_norm_params(layer: nn.BatchNorm2d) -> Params:
    """Scale, shift and running statistics."""
    return {**norm_params(layer), "mean": array(layer.running_mean), "variance": array(layer.running_var)}


def resnet_params(model: ResNet) -> Params:
    """The weights of a ResNet on CPU, for `resnet_jax`."""
    return {
        "stem": array(model.stem.weight),
        "norm": batch_norm_params(model.norm),
        "blocks": [
            {
                "conv1": array(block.conv1.weight),
                "norm1": batch_norm_params(block.norm1),
                "conv2": array(block.conv2.weight),
                "norm2": batch_norm_params(block.norm2),
                **({} if block.shortcut is None else {"shortcut": array(block.shortcut.weight)}),
            }
            for block in model.blocks
        ],
        "head": linear_params(model.head),
    }


def convolve(x: jax.Array, weight: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution that keeps the size (over `stride`): x (N, C, H, W), weight (out, in, k, k)."""
    pad = weight.shape[-1] // 2
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), ((pad, pad), (pad, pad)))


def batch_norm(params: Params, x: jax.Array) -> jax.Array:
    """Batch norm in eval mode, over the channels of (N, C, H, W)."""
    scale = params["scale"] * jax.lax.rsqrt(params["variance"] + 1e-5)
    return x * scale[:, None, None] + (params["shift"] - params["mean"] * scale)[:, None, None]


def resnet_jax(params: Params, images: jax.Array) -> jax.Array:
    """`ResNet.forward` in eval mode."""
    x = jax.nn.relu(batch_norm(params["norm"], convolve(images, params["stem"])))
    for block, stride in zip(params["blocks"], RESNET_STRIDES, strict=True):
        y = jax.nn.relu(batch_norm(block["norm1"], convolve(x, block["conv1"], stride)))
        y = batch_norm(block["norm2"], convolve(y, block["conv2"]))
        x = jax.nn.relu(y + (convolve(x, block["shortcut"], stride) if "shortcut" in block else x))
    return linear(params["head"], x.mean((2, 3)))


# -- inputs ----------------------------------------------------------------------------------------


def make_gpt(config: GPTConfig) -> tuple[GPT, torch.Tensor]:
    """A GPT with its weights always the same, and (N, T + 1) random tokens for it, on CPU."""
    torch.manual_seed(0)
    return GPT(config), torch.randint(0, config.vocabulary, (config.batch, config.length + 1))


def make_resnet(batch: int = 8) -> tuple[ResNet, torch.Tensor]:
    """A ResNet in eval mode with running statistics as after training, and (N, 3, 32, 32) images, on CPU."""
    torch.manual_seed(0)
    model = ResNet()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.5, 1.5)
    return model.eval(), torch.randn(batch, 3, 32, 32)


def int32(tokens: torch.Tensor) -> jax.Array:
    """Tokens as JAX holds integers by default."""
    return jnp.asarray(tokens.numpy().astype(np.int32))
