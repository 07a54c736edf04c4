"""JAX written by hand for the models of `comparison.py`: ResNet-18, a ViT-tiny, an LSTM and a Llama.

As in `models.py`, this is what a JAX user would write, on the torch model's own weights: parameters in dicts and lists,
weights stored as (in, out), `jax.lax.scan` over time, no library above it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from torch import nn

from torchax_core.benchmarking.models import (
    Params,
    array,
    attention,
    batch_norm_params,
    block_params,
    convolve,
    layer_norm,
    linear,
    linear_params,
    matmul,
    norm_params,
)

__all__ = ["llama", "llama_params", "lstm", "lstm_params", "resnet18", "resnet18_params", "vit", "vit_params"]


# -- ResNet-18 (torchvision) -----------------------------------------------------------------------


def resnet18_params(model: nn.Module) -> Params:
    """The weights and running statistics of torchvision's resnet18 on CPU."""

    def block(layer: nn.Module) -> Params:
        params = {
            "conv1": array(layer.conv1.weight),
            "norm1": batch_norm_params(layer.bn1),
            "conv2": array(layer.conv2.weight),
            "norm2": batch_norm_params(layer.bn2),
        }
        if layer.downsample is not None:
            params |= {"shortcut": array(layer.downsample[0].weight), "norm3": batch_norm_params(layer.downsample[1])}
        return params

    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    return {
        "stem": array(model.conv1.weight),
        "norm": batch_norm_params(model.bn1),
        "blocks": [block(layer) for stage in stages for layer in stage],
        "head": linear_params(model.fc),
    }


def _norm(params: Params, x: jax.Array, train: bool) -> tuple[jax.Array, Params]:
    """Batch norm over the channels of (N, C, H, W), and the parameters with new running statistics."""
    mean, variance = params["mean"], params["variance"]
    if train:
        count = x.size / x.shape[1]
        mean = x.mean((0, 2, 3))
        variance = jnp.square(x - mean[:, None, None]).mean((0, 2, 3))
        unbiased = variance * (count / (count - 1))
        params = params | {
            "mean": jax.lax.stop_gradient(0.9 * params["mean"] + 0.1 * mean),
            "variance": jax.lax.stop_gradient(0.9 * params["variance"] + 0.1 * unbiased),
        }
    scale = params["scale"] * jax.lax.rsqrt(variance + 1e-5)
    return x * scale[:, None, None] + (params["shift"] - mean * scale)[:, None, None], params


def resnet18(params: Params, images: jax.Array, *, train: bool = False) -> tuple[jax.Array, Params]:
    """(N, 3, H, W) images to (N, classes) logits, and the parameters with their new running statistics."""
    new: Params = {**params, "blocks": []}
    x, new["norm"] = _norm(params["norm"], _strided(images, params["stem"], 2, 3), train)
    x = jax.lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
    )
    for block in params["blocks"]:
        made = dict(block)
        stride = 2 if "shortcut" in block and block["shortcut"].shape[0] != block["shortcut"].shape[1] else 1
        y, made["norm1"] = _norm(block["norm1"], convolve(x, block["conv1"], stride), train)
        y, made["norm2"] = _norm(block["norm2"], convolve(jax.nn.relu(y), block["conv2"]), train)
        if "shortcut" in block:
            x, made["norm3"] = _norm(block["norm3"], convolve(x, block["shortcut"], stride), train)
        x = jax.nn.relu(x + y)
        new["blocks"].append(made)
    return linear(params["head"], x.mean((2, 3))), new


def _strided(x: jax.Array, weight: jax.Array, stride: int, pad: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), ((pad, pad), (pad, pad)))


# -- ViT -------------------------------------------------------------------------------------------


def vit_params(model: nn.Module) -> Params:
    """The weights of `comparison.ViT` on CPU."""
    return {
        "patches": {"w": array(model.patches.weight), "b": array(model.patches.bias)},
        "token": array(model.token),
        "positions": array(model.positions),
        "norm": norm_params(model.norm),
        "head": linear_params(model.head),
        "blocks": [block_params(block) for block in model.blocks],
    }


def vit(params: Params, images: jax.Array, *, heads: int) -> jax.Array:
    """(N, 3, H, W) images to (N, classes) logits."""
    size = params["patches"]["w"].shape[-1]
    x = _strided(images, params["patches"]["w"], size, 0) + params["patches"]["b"][:, None, None]
    n, c = x.shape[:2]
    x = x.reshape(n, c, -1).swapaxes(1, 2)
    x = jnp.concatenate([jnp.broadcast_to(params["token"], (n, 1, c)), x], 1) + params["positions"]
    for block in params["blocks"]:
        qkv = linear(block["qkv"], layer_norm(block["norm1"], x)).reshape(n, -1, 3, heads, c // heads)
        query, key, value = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        mixed = attention(query, key, value, causal=False).transpose(0, 2, 1, 3).reshape(n, -1, c)
        x = x + linear(block["project"], mixed)
        hidden = jax.nn.gelu(linear(block["up"], layer_norm(block["norm2"], x)), approximate=False)
        x = x + linear(block["down"], hidden)
    return linear(params["head"], layer_norm(params["norm"], x)[:, 0])


# -- LSTM ------------------------------------------------------------------------------------------


def lstm_params(model: nn.Module) -> Params:
    """The weights of `comparison.LSTM` on CPU; the two biases of a layer as one."""
    layers = [
        {
            "w": array(getattr(model.lstm, f"weight_ih_l{i}").T),
            "u": array(getattr(model.lstm, f"weight_hh_l{i}").T),
            "b": array(getattr(model.lstm, f"bias_ih_l{i}") + getattr(model.lstm, f"bias_hh_l{i}")),
        }
        for i in range(model.lstm.num_layers)
    ]
    return {"embedding": array(model.embedding.weight), "layers": layers, "head": linear_params(model.head)}


def lstm(params: Params, tokens: jax.Array) -> jax.Array:
    """(N, T) tokens to (N, T, vocabulary) logits."""
    x = params["embedding"][tokens].swapaxes(0, 1)
    for layer in params["layers"]:
        width = layer["u"].shape[0]
        zeros = jnp.zeros((x.shape[1], width), x.dtype)

        def step(
            carry: tuple[jax.Array, jax.Array], gates: jax.Array, u: jax.Array = layer["u"]
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            hidden, cell = carry
            i, f, g, o = jnp.split(gates + hidden @ u, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        _, x = jax.lax.scan(step, (zeros, zeros), matmul(x, layer["w"]) + layer["b"])
    return linear(params["head"], x.swapaxes(0, 1))


# -- Llama (transformers) --------------------------------------------------------------------------


def llama_params(model: nn.Module) -> Params:
    """The weights of a LlamaForCausalLM on CPU."""
    return {
        "tokens": array(model.model.embed_tokens.weight),
        "norm": array(model.model.norm.weight),
        "head": array(model.lm_head.weight.T),
        "blocks": [
            {
                "norm1": array(layer.input_layernorm.weight),
                "norm2": array(layer.post_attention_layernorm.weight),
                **{name: array(getattr(layer.self_attn, f"{name}_proj").weight.T) for name in "qkvo"},
                **{name: array(getattr(layer.mlp, f"{name}_proj").weight.T) for name in ("gate", "up", "down")},
            }
            for layer in model.model.layers
        ],
    }


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return scale * (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6))


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def llama(params: Params, tokens: jax.Array, *, heads: int, groups: int, theta: float = 10000.0) -> jax.Array:
    """(N, T) tokens to (N, T, vocabulary) logits; `groups` key and value heads serve `heads` query heads."""
    n, t = tokens.shape
    x = params["tokens"][tokens]
    depth = x.shape[-1] // heads
    frequencies = theta ** (-jnp.arange(0, depth, 2, dtype=x.dtype) / depth)
    angles = jnp.arange(t, dtype=x.dtype)[:, None] * jnp.concatenate([frequencies, frequencies])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    for block in params["blocks"]:
        y = _rms_norm(block["norm1"], x)
        query = _rotated(matmul(y, block["q"]).reshape(n, t, heads, depth).swapaxes(1, 2), cos, sin)
        key = _rotated(matmul(y, block["k"]).reshape(n, t, groups, depth).swapaxes(1, 2), cos, sin)
        value = matmul(y, block["v"]).reshape(n, t, groups, depth).swapaxes(1, 2)
        key, value = (jnp.repeat(a, heads // groups, axis=1) for a in (key, value))
        x = x + matmul(attention(query, key, value).swapaxes(1, 2).reshape(n, t, -1), block["o"])
        y = _rms_norm(block["norm2"], x)
        x = x + matmul(jax.nn.silu(matmul(y, block["gate"])) * matmul(y, block["up"]), block["down"])
    return matmul(_rms_norm(params["norm"], x), params["head"])
