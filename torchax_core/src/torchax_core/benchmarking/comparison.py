"""Five models, jitted forward and AdamW step, against JAX written by hand, eager torch and inductor.

    torchax bench comparison               # or, in the repository, python benchmarks/comparison.py

A GPT, torchvision's ResNet-18, a ViT-tiny, an LSTM language model and a Llama of `transformers`, each an unmodified torch
module on device "jax", and in JAX as a user would write it (`models.py`, `handwritten.py`), from the same weights. Logits,
and the losses of three steps, are compared before anything is timed. Reported per model, forward and step: the ratio of the
times of a compiled call, of the instructions and of the memory of XLA's programs, and of the first calls (trace and
compile) in fresh processes; CPU torch's times stand beside, eager and compiled by inductor.

google/torchax is not among the contenders: its latest release, 0.0.13, cannot be imported beside torch 2.13 or 2.14 (it
names an overload, aten::prod.dim_Dimname, that torch has no more).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json as jsonlib
import shutil
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
import typer
from torch import nn

import torchax_core
from torchax_core.benchmarking import handwritten
from torchax_core.benchmarking.common import (
    Json,
    Quick,
    console,
    count_instructions,
    interleave,
    make_table,
    measure_first_calls,
    print_line,
    progress,
    time_calls,
    verdict,
    write_json,
)
from torchax_core.benchmarking.models import GPTConfig, Params, array, gpt_jax, gpt_params, int32, make_gpt

LIMITS = {
    "forward": {"ratio": 1.03, "instructions": 1.05, "memory": 1.05, "first": 1.2},
    "step": {"ratio": 1.05, "instructions": 1.05, "memory": 1.05, "first": 1.2},
}

LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01


# -- the torch modules that no library has ---------------------------------------------------------


class ViTBlock(nn.Module):
    """One layer of a vision transformer, (N, T, C) to (N, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.project(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


VIT_HEADS = 3


class ViT(nn.Module):
    """ViT-tiny: (N, 3, 224, 224) images to (N, 1000) logits; patches of 16, 192 wide, 12 layers."""

    def __init__(self, width: int = 192, layers: int = 12, patch: int = 16, size: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[ViTBlock(width, VIT_HEADS) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class LSTM(nn.Module):
    """(N, T) tokens to (N, T, vocabulary) logits through two layers of LSTM, 256 wide."""

    def __init__(self, vocabulary: int = 1024, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


# -- the cases -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in torch and in JAX.

    make:    the torch module, its input and the classes to be predicted, on CPU.
    params:  the module's weights for the JAX functions.
    forward: (params, input) -> logits in eval mode.
    train:   (params, input) -> logits in train mode, and the params with what the forward itself updates.
    needs:   the distribution the module is from.
    """

    make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]
    params: Callable[[Any], Params]
    forward: Callable[[Params, jax.Array], jax.Array]
    train: Callable[[Params, jax.Array], tuple[jax.Array, Params]]
    needs: str = "torch"


def _stateless(forward: Callable[[Params, jax.Array], jax.Array]) -> Callable[[Params, jax.Array], Any]:
    return lambda params, inputs: (forward(params, inputs), params)


def _make_gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model, tokens = make_gpt(GPTConfig())
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _make_resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return resnet18(), torch.randn(4, 3, 96, 96), torch.randint(0, 1000, (4,))


def _make_vit() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return ViT(), torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (2,))


def _make_lstm() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return LSTM(), torch.randint(0, 1024, (8, 64)), torch.randint(0, 1024, (8, 64))


LLAMA: dict[str, Any] = {"heads": 8, "groups": 4}


def _make_llama() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=LLAMA["heads"],
        num_key_value_heads=LLAMA["groups"],
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config), torch.randint(0, 1024, (4, 64)), torch.randint(0, 1024, (4, 64))


_gpt = partial(gpt_jax, heads=GPTConfig().heads)
_vit = partial(handwritten.vit, heads=VIT_HEADS)
_llama = partial(handwritten.llama, **LLAMA)

CASES = {
    "gpt": Case(_make_gpt, gpt_params, _gpt, _stateless(_gpt)),
    "resnet18": Case(
        _make_resnet,
        handwritten.resnet18_params,
        lambda params, images: handwritten.resnet18(params, images)[0],
        partial(handwritten.resnet18, train=True),
        needs="torchvision",
    ),
    "vit-tiny": Case(_make_vit, handwritten.vit_params, _vit, _stateless(_vit)),
    "lstm": Case(_make_lstm, handwritten.lstm_params, handwritten.lstm, _stateless(handwritten.lstm)),
    "llama": Case(_make_llama, handwritten.llama_params, _llama, _stateless(_llama), needs="transformers"),
}

KINDS = ("forward", "step")


def _logits(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    out = module(inputs)
    return out if isinstance(out, torch.Tensor) else out.logits


def _torch_call(kind: str, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], Any]:
    """The torch program of that kind on these tensors, neither jitted nor compiled."""
    if kind == "forward":
        module.eval()

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return _logits(module, inputs)

        return forward
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(_logits(module, inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def ours(name: str, kind: str) -> Any:
    """The torch program on device "jax", jitted."""
    module, inputs, targets = CASES[name].make()
    return torchax_core.jit(_torch_call(kind, module.to("jax"), inputs.to("jax"), targets.to("jax")))


class HandWritten:
    """The JAX program, with the state that it carries from call to call."""

    def __init__(self, name: str, kind: str) -> None:
        case = CASES[name]
        module, inputs, targets = case.make()
        self.kind = kind
        self.inputs = array(inputs) if inputs.is_floating_point() else int32(inputs)
        self.targets = int32(targets)
        params = case.params(module)
        if kind == "forward":
            self.params: Params = params
            self.program: Any = jax.jit(case.forward)
            return
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.weights, self.statistics = _split(params)
        self.state: Any = None
        self.init = optimizer.init

        def loss_of(weights: Params, statistics: Params, inputs: jax.Array, targets: jax.Array) -> Any:
            logits, new = case.train(_merged(weights, statistics), inputs)
            logits = logits.reshape(-1, logits.shape[-1])
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets.reshape(-1, 1), axis=-1)
            return -chosen.mean(), _split(new)[1]

        def step(weights: Params, statistics: Params, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
            (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                weights, statistics, inputs, targets
            )
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), statistics, state, loss

        self.program = jax.jit(step, donate_argnums=(0, 1, 2))

    def arguments(self) -> tuple[Any, ...]:
        """What the program is called with now. The first call makes the optimizer's state, as torch's does."""
        if self.kind == "forward":
            return self.params, self.inputs
        if self.state is None:
            self.state = self.init(self.weights)
        return self.weights, self.statistics, self.state, self.inputs, self.targets

    def __call__(self) -> jax.Array:
        """One call: the logits, or the loss before the step."""
        out = self.program(*self.arguments())
        if self.kind == "forward":
            return out  # type: ignore[no-any-return]
        self.weights, self.statistics, self.state, loss = out
        return loss  # type: ignore[no-any-return]


def _split(params: Params) -> tuple[Params, Params]:
    """What the optimizer trains, and the running statistics; each with None in the place of the other."""

    def is_statistic(path: Any) -> bool:
        return getattr(path[-1], "key", None) in ("mean", "variance")

    trained = jax.tree_util.tree_map_with_path(lambda path, x: None if is_statistic(path) else x, params)
    kept = jax.tree_util.tree_map_with_path(lambda path, x: x if is_statistic(path) else None, params)
    return trained, kept


def _merged(trained: Params, kept: Params) -> Params:
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda a, b: b if a is None else a, trained, kept, is_leaf=lambda x: x is None
    )


# -- measuring -------------------------------------------------------------------------------------


def _memory(compiled: Any) -> int:
    """Bytes that a program holds at its peak, as XLA plans them."""
    analysis = compiled.memory_analysis()
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def _check(name: str, kind: str) -> None:
    """That both programs compute the same: logits, or the losses of three steps."""
    mine, hand = ours(name, kind), HandWritten(name, kind)
    for _ in range(1 if kind == "forward" else 3):
        np.testing.assert_allclose(mine().jax(), hand(), rtol=2e-3, atol=2e-3, err_msg=f"{name}, {kind}")


def measure(name: str, kind: str, *, rounds: int, inductor: bool) -> dict[str, float]:
    """The times of a compiled call, and the size of the programs."""
    progress(f"{name}, {kind}: the same results?")
    _check(name, kind)
    mine, hand = ours(name, kind), HandWritten(name, kind)
    on_cpu = _torch_call(kind, *CASES[name].make())
    contenders = {"ours": lambda: mine, "jax": lambda: hand, "eager": lambda: on_cpu}
    if inductor:
        compiled = torch.compile(_torch_call(kind, *CASES[name].make()))
        contenders["inductor"] = lambda: compiled
    progress(f"{name}, {kind}: compiled calls")
    timings = interleave(contenders, rounds=rounds, calls=2)
    programs = mine.lower().compile(), hand.program.lower(*hand.arguments()).compile()
    sizes = [count_instructions(program.as_text()) for program in programs]
    bytes_held = [_memory(program) for program in programs]
    return {
        **{f"{which}_ms": 1e3 * timings.median(which) for which in contenders},
        "ratio": timings.ratio("ours", "jax"),
        "ours_instructions": sizes[0],
        "jax_instructions": sizes[1],
        "instructions": sizes[0] / sizes[1],
        "ours_bytes": bytes_held[0],
        "jax_bytes": bytes_held[1],
        "memory": bytes_held[0] / bytes_held[1],
    }


def first_call(worker: str) -> list[float]:
    """Seconds of the first calls of "MODEL:KIND:ours" or "MODEL:KIND:jax" in this process."""
    name, kind, side = worker.split(":")
    return time_calls(ours(name, kind) if side == "ours" else HandWritten(name, kind))


def main(
    quick: Quick = False,
    json: Json = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"Only this one, of {', '.join(CASES)}; may be repeated.")
    ] = None,
    inductor: Annotated[
        bool, typer.Option(help="Time CPU torch compiled by inductor as well; compiling takes long.")
    ] = shutil.which("g++") is not None,
    worker: Annotated[str | None, typer.Option(hidden=True, help="Time the first calls of one contender.")] = None,
) -> Any:
    """Time five models' jitted forward and AdamW step on device "jax" against hand-written JAX, and CPU torch."""
    if worker is not None:
        return print_line(jsonlib.dumps(first_call(worker)))
    unknown = sorted(set(models or ()) - CASES.keys())
    if unknown:
        raise typer.BadParameter(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}.")
    chosen = [name for name in models or CASES if importlib.util.find_spec(CASES[name].needs) is not None]
    for name in set(models or CASES) - set(chosen):
        console.print(f"{name} is left out: {CASES[name].needs} is not installed.")

    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name in chosen:
        for kind in KINDS:
            row = measure(name, kind, rounds=3 if quick else 21, inductor=inductor)
            contenders = [f"{name}:{kind}:{side}" for side in ("ours", "jax")]
            first = measure_first_calls("torchax_core.benchmarking.comparison", contenders, processes=1 if quick else 3)
            row["ours_first_s"], row["jax_first_s"] = (first[c][0] for c in contenders)
            row["first"] = row["ours_first_s"] / row["jax_first_s"]
            rows.setdefault(name, {})[kind] = row

    for kind in KINDS:
        table = make_table(
            f"Jitted {'forward' if kind == 'forward' else 'AdamW step'}, ms; ours over JAX by hand; CPU torch, ms",
            ["model", "ms", "jax", "ratio", "HLO", "bytes", "first", "eager", "induct."],
        )
        for name in chosen:
            row = rows[name][kind]
            table.add_row(
                name,
                *[f"{row[f'{which}_ms']:.3g}" for which in ("ours", "jax")],
                *[f"{row[key]:.2f}" for key in ("ratio", "instructions", "memory", "first")],
                *[f"{row[f'{which}_ms']:.3g}" if f"{which}_ms" in row else "-" for which in ("eager", "inductor")],
            )
        console.print(table)
        for key, limit in LIMITS[kind].items():
            worst = max(chosen, key=lambda name, key=key: rows[name][kind][key])  # type: ignore[misc]
            console.print(f"{kind}, {key}, the worst ({worst}): {verdict(rows[worst][kind][key], limit)}")
        faster = [
            name
            for name in chosen
            if min(rows[name][kind][f"{w}_ms"] for w in ("eager", "inductor") if f"{w}_ms" in rows[name][kind])
            < rows[name][kind]["ours_ms"]
        ]
        if faster:
            console.print(f"{kind}: CPU torch, eager or by inductor, is faster than XLA on {', '.join(faster)}.")
    return write_json(json, {"comparison": rows})


if __name__ == "__main__":
    typer.run(main)
