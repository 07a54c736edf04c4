"""GPT-2 on eight devices: data parallel, FSDP, tensor parallel and both at once, by rules on the names of its weights.

    python examples/sharded_gpt2.py         # --help lists the options

What it shows: the model of transformers, the optimizer and the training step are those of one device. `shard_module`
says which weight lies how on the devices of a mesh; XLA finds out what has to be sent between them. Every layout gives
the losses of one device, and weights, gradients and AdamW's state stay in their parts. Where jax finds only a CPU, eight
virtual devices are made of it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
from typing import Annotated, Any

import jax
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import torchax_core
from torchax_core.distributed import distribute_tensor, shard_module

DEVICES = 8
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# Megatron's rules: the first matrix of attention and of the mlp is split by columns, so that each device has some of the
# heads and some of the hidden units; the second by rows, after which the devices' results are added up. GPT-2's matrices
# are (in, out).
TENSOR_PARALLEL = {
    "*.c_attn.weight": jax.P(None, "tp"),
    "*.c_attn.bias": jax.P("tp"),
    "*.attn.c_proj.weight": jax.P("tp", None),
    "*.c_fc.weight": jax.P(None, "tp"),
    "*.c_fc.bias": jax.P("tp"),
    "*.mlp.c_proj.weight": jax.P("tp", None),
    "*.wte.weight": jax.P("tp", None),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, how the weights lie on it (whole on every device if no rule says otherwise), and how the batch does."""

    mesh: dict[str, int]
    rules: dict[str, jax.P]
    batch: jax.P


LAYOUTS = {
    "data parallel": Layout({"dp": 8}, {}, jax.P("dp")),
    "fsdp": Layout({"dp": 8}, {"*": jax.P("dp")}, jax.P("dp")),
    "tensor parallel": Layout({"tp": 8}, TENSOR_PARALLEL, jax.P()),
    # what tensor parallelism leaves whole, or whole in one dimension, is split over the other axis
    "fsdp and tensor parallel": Layout(
        {"dp": 2, "tp": 4},
        {
            "*.c_attn.weight": jax.P("dp", "tp"),
            "*.c_attn.bias": jax.P("tp"),
            "*.attn.c_proj.weight": jax.P("tp", "dp"),
            "*.c_fc.weight": jax.P("dp", "tp"),
            "*.c_fc.bias": jax.P("tp"),
            "*.mlp.c_proj.weight": jax.P("tp", "dp"),
            "*.wte.weight": jax.P("tp", "dp"),
            "*": jax.P("dp"),
        },
        jax.P("dp"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses, the collectives in the compiled step, the part of weights and AdamW's state that a device holds, and what
    of them did not stay where it was put."""

    losses: list[float]
    collectives: dict[str, int]
    held: float
    moved: list[str]


def make_model() -> GPT2LMHeadModel:
    """A GPT-2 of 2 layers, without dropout so that every layout computes the same."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 8}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def train(model: GPT2LMHeadModel, batches: list[torch.Tensor]) -> tuple[list[float], Any, torch.optim.Optimizer]:
    """An AdamW step for each batch, as one program; the loss before each, that program, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @torchax_core.jit
    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(tokens).item() for tokens in batches]
    return losses, step.lower(batches[0]).compile(), optimizer


def run(layout: Layout, model: GPT2LMHeadModel, batches: list[torch.Tensor]) -> Run:
    """Train `model`, which is on the CPU, on a layout's mesh."""
    mesh = jax.make_mesh(tuple(layout.mesh.values()), tuple(layout.mesh))
    shard_module(model, mesh, layout.rules)
    before = {name: weight.jax().sharding for name, weight in model.named_parameters()}
    losses, program, optimizer = train(model, [distribute_tensor(b, mesh, layout.batch) for b in batches])
    state: dict[str, Any] = dict(model.named_parameters())
    for name, weight in model.named_parameters():
        state[f"{name}.grad"] = weight.grad
        state |= {f"{name}.{key}": optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")}
    moved = []
    for key, tensor in state.items():
        home = next(s for name, s in before.items() if key.startswith(name))
        if not tensor.jax().sharding.is_equivalent_to(home, tensor.ndim):
            moved.append(f"{key}: {home.spec} -> {tensor.jax().sharding}")
    held = sum(tensor.jax().addressable_shards[0].data.size for tensor in state.values())
    found = collections.Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text()))
    return Run(
        losses, {name: found[name] for name in COLLECTIVES}, held / sum(t.numel() for t in state.values()), moved
    )


def main(
    steps: Annotated[int, typer.Option(min=1, help="AdamW steps to compare.")] = 5,
    batch: Annotated[int, typer.Option(min=8, help="Sequences in a batch: a multiple of 8.")] = 8,
) -> dict[str, Run]:
    """Train GPT-2 on one device, and by each layout on eight; print the losses side by side."""
    if jax.config.jax_num_cpu_devices < DEVICES:
        jax.config.update("jax_num_cpu_devices", DEVICES)  # of which jax takes note if there is no other kind
    model = make_model()
    starts = torch.randint(0, 16, (steps, batch, 1), generator=torch.Generator().manual_seed(1))
    batches = list((starts + torch.arange(16)) % 16)  # it learns to count
    alone, _, _ = train(copy.deepcopy(model).to("jax"), [b.to("jax") for b in batches])
    runs = {"one device": Run(alone, dict.fromkeys(COLLECTIVES, 0), 1.0, [])}
    runs |= {name: run(layout, copy.deepcopy(model), batches) for name, layout in LAYOUTS.items()}

    table = Table(
        title=f"GPT-2, {sum(p.numel() for p in model.parameters()):,} weights, on {jax.device_count()} devices"
    )
    for column in ("layout", "first loss", "last loss", "on a device", "collectives in a step"):
        table.add_column(column)
    for name, done in runs.items():
        collectives = "\n".join(f"{count:3d} {what}" for what, count in done.collectives.items() if count)
        table.add_row(name, f"{done.losses[0]:.6f}", f"{done.losses[-1]:.6f}", f"{done.held:.0%}", collectives)
    Console().print(table)
    return runs


if __name__ == "__main__":
    typer.run(main)
