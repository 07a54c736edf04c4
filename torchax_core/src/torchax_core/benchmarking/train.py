"""Jitted training: one AdamW step of a GPT (4 layers, 256 wide) on device "jax" against hand-written JAX and optax.

    torchax bench train                # or, in the repository, python benchmarks/train.py

The torch side is an ordinary imperative step under `torchax_core.jit`; the JAX side is `jax.value_and_grad` and
`optax.adamw` under `jax.jit`, with parameters and optimizer state donated. Both must follow the same losses before
anything is timed. Reported: the ratio of the times of a compiled step, of the first calls (trace and compile) in
fresh processes, and the number of instructions that XLA runs. torch optimizers make their state in the first step,
so the first two calls differ and both may compile; the first three calls together are reported as well.
"""

from __future__ import annotations

import json as jsonlib
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import optax
import torch
import typer

import torchax_core
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
from torchax_core.benchmarking.models import GPTConfig, Params, gpt_loss, gpt_loss_jax, gpt_params, int32, make_gpt
from torchax_core.jit import JittedFunction

STEADY_LIMIT, FIRST_CALL_LIMIT = 1.05, 1.3

LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01

CONFIG = GPTConfig()


def ours() -> tuple[JittedFunction, torch.Tensor]:
    """The jitted torch step and its tokens, on device "jax"."""
    model, tokens = make_gpt(CONFIG)
    model = model.to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    @torchax_core.jit
    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = gpt_loss(model, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step, tokens.to("jax")


class HandWritten:
    """The JAX step, with the parameters and the optimizer state that it carries from call to call."""

    def __init__(self) -> None:
        model, tokens = make_gpt(CONFIG)
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.tokens = int32(tokens)
        self.params = gpt_params(model)
        self.state: Any = None
        self.init = optimizer.init

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
            loss, gradients = jax.value_and_grad(gpt_loss_jax)(params, tokens, CONFIG.heads)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.step = step

    def __call__(self) -> jax.Array:
        """One step; the loss before it. The first makes the optimizer's state, as torch's does."""
        if self.state is None:
            self.state = self.init(self.params)
        self.params, self.state, loss = self.step(self.params, self.state, self.tokens)
        return loss

    def program(self) -> str:
        """The compiled step as XLA prints it."""
        return self.step.lower(self.params, self.state, self.tokens).compile().as_text()


def measure(rounds: int) -> dict[str, float]:
    """Check that both follow the same losses; the times of a compiled step, and the size of the programs."""
    progress("train: compiled steps")
    (step, tokens), by_hand = ours(), HandWritten()
    losses = [(step(tokens).item(), by_hand().item()) for _ in range(5)]
    np.testing.assert_allclose([a for a, _ in losses], [b for _, b in losses], rtol=1e-3)
    timings = interleave({"ours": lambda: lambda: step(tokens), "jax": lambda: by_hand}, rounds=rounds)
    return {
        "ours_ms": 1e3 * timings.median("ours"),
        "jax_ms": 1e3 * timings.median("jax"),
        "ratio": timings.ratio("ours", "jax"),
        "ours_instructions": count_instructions(step.lower(tokens).compile().as_text()),
        "jax_instructions": count_instructions(by_hand.program()),
    }


def first_call(side: str) -> list[float]:
    """Seconds of the first calls of "ours" or "jax" in this process."""
    if side == "ours":
        step, tokens = ours()
        return time_calls(lambda: step(tokens))
    return time_calls(HandWritten())


def main(
    quick: Quick = False,
    json: Json = None,
    worker: Annotated[str | None, typer.Option(hidden=True, help="Time the first calls of one contender.")] = None,
) -> Any:
    """Time a jitted AdamW step on device "jax" against hand-written JAX and optax: steady state, first call, size."""
    if worker is not None:
        return print_line(jsonlib.dumps(first_call(worker)))
    row = measure(rounds=5 if quick else 41)
    first = measure_first_calls("torchax_core.benchmarking.train", ["ours", "jax"], processes=1 if quick else 5)
    row |= {
        "jax_first_s": first["jax"][0],
        "ours_first_s": first["ours"][0],
        "first_ratio": first["ours"][0] / first["jax"][0],
        "first_three_ratio": sum(first["ours"]) / sum(first["jax"]),
    }

    table = make_table("Jitted AdamW step of the GPT", ["figure", "jax and optax by hand", "ours", "ratio"])
    table.add_row("compiled step, ms", f"{row['jax_ms']:.2f}", f"{row['ours_ms']:.2f}", f"{row['ratio']:.3f}")
    table.add_row("first call, s", f"{first['jax'][0]:.2f}", f"{first['ours'][0]:.2f}", f"{row['first_ratio']:.2f}")
    totals = sum(first["jax"]), sum(first["ours"])
    table.add_row("first three calls, s", f"{totals[0]:.2f}", f"{totals[1]:.2f}", f"{row['first_three_ratio']:.2f}")
    table.add_row("HLO instructions", str(row["jax_instructions"]), str(row["ours_instructions"]))
    console.print(table)
    console.print(f"compiled step: {verdict(row['ratio'], STEADY_LIMIT)}")
    console.print(f"first call:    {verdict(row['first_ratio'], FIRST_CALL_LIMIT)}")
    return write_json(json, {"train": row})


if __name__ == "__main__":
    typer.run(main)
