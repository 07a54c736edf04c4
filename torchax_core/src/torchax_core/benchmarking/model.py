"""Jitted inference: a GPT (4 layers, 256 wide) and a small ResNet on device "jax" against JAX written by hand.

    torchax bench model                # or, in the repository, python benchmarks/model.py

Both compute the same logits from the same weights (checked first), channels first for the ResNet. Reported: the ratio
of the times of a call once compiled, the ratio of the first calls (trace and compile) in fresh processes, and the
number of instructions in the programs that XLA made of them.
"""

from __future__ import annotations

import json as jsonlib
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
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
from torchax_core.benchmarking.models import (
    GPTConfig,
    array,
    gpt_jax,
    gpt_params,
    int32,
    make_gpt,
    make_resnet,
    resnet_jax,
    resnet_params,
)
from torchax_core.jit import JittedFunction

STEADY_LIMIT, FIRST_CALL_LIMIT = 1.05, 1.3

MODELS = ("gpt", "resnet")


def inputs_of(model: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The torch model of that name in eval mode, and its input, on CPU."""
    if model == "gpt":
        module, tokens = make_gpt(GPTConfig())
        return module.eval(), tokens[:, :-1].contiguous()
    return make_resnet()


def ours(model: str) -> tuple[JittedFunction, torch.Tensor]:
    """The jitted torch forward and its input, on device "jax"."""
    module, inputs = inputs_of(model)
    module = module.to("jax")

    @torchax_core.jit
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(inputs)

    return forward, inputs.to("jax")


def theirs(model: str) -> tuple[Any, tuple[Any, jax.Array]]:
    """The hand-written JAX forward, jitted, and its parameters and input."""
    module, inputs = inputs_of(model)
    if model == "gpt":
        return jax.jit(partial(gpt_jax, heads=GPTConfig().heads)), (gpt_params(module), int32(inputs))
    return jax.jit(resnet_jax), (resnet_params(module), array(inputs))


def measure(model: str, rounds: int) -> dict[str, float]:
    """Check that both compute the same; the times of a compiled call, and the size of the programs."""
    progress(f"model: {model}, compiled calls")
    (forward, inputs), (jax_forward, jax_inputs) = ours(model), theirs(model)
    np.testing.assert_allclose(forward(inputs).jax(), jax_forward(*jax_inputs), rtol=1e-3, atol=1e-4)
    timings = interleave(
        {"ours": lambda: lambda: forward(inputs), "jax": lambda: lambda: jax_forward(*jax_inputs)},
        rounds=rounds,
        calls=3,
    )
    return {
        "ours_ms": 1e3 * timings.median("ours"),
        "jax_ms": 1e3 * timings.median("jax"),
        "ratio": timings.ratio("ours", "jax"),
        "ours_instructions": count_instructions(forward.lower(inputs).compile().as_text()),
        "jax_instructions": count_instructions(jax_forward.lower(*jax_inputs).compile().as_text()),
    }


def first_call(worker: str) -> list[float]:
    """Seconds of the first calls of "MODEL:ours" or "MODEL:jax" in this process."""
    model, side = worker.split(":")
    if side == "ours":
        forward, inputs = ours(model)
        return time_calls(lambda: forward(inputs))
    jax_forward, jax_inputs = theirs(model)
    return time_calls(lambda: jax_forward(*jax_inputs))


def main(
    quick: Quick = False,
    json: Json = None,
    worker: Annotated[str | None, typer.Option(hidden=True, help="Time the first calls of one contender.")] = None,
) -> Any:
    """Time jitted forward passes on device "jax" against hand-written JAX: steady state, first call, program size."""
    if worker is not None:
        return print_line(jsonlib.dumps(first_call(worker)))
    steady = {model: measure(model, rounds=5 if quick else 41) for model in MODELS}
    contenders = [f"{model}:{side}" for model in MODELS for side in ("ours", "jax")]
    first = measure_first_calls("torchax_core.benchmarking.model", contenders, processes=1 if quick else 5)

    table = make_table("Jitted forward", ["model, figure", "jax by hand", "ours", "ratio"])
    for model, row in steady.items():
        row["jax_first_s"], row["ours_first_s"] = first[f"{model}:jax"][0], first[f"{model}:ours"][0]
        row["first_ratio"] = row["ours_first_s"] / row["jax_first_s"]
        table.add_row(
            f"{model}, compiled call, ms", f"{row['jax_ms']:.2f}", f"{row['ours_ms']:.2f}", f"{row['ratio']:.3f}"
        )
        table.add_row(
            f"{model}, first call, s",
            f"{row['jax_first_s']:.2f}",
            f"{row['ours_first_s']:.2f}",
            f"{row['first_ratio']:.2f}",
        )
        table.add_row(f"{model}, HLO instructions", str(row["jax_instructions"]), str(row["ours_instructions"]))
    console.print(table)
    for model, row in steady.items():
        console.print(f"{model}, compiled call: {verdict(row['ratio'], STEADY_LIMIT)}")
        console.print(f"{model}, first call:    {verdict(row['first_ratio'], FIRST_CALL_LIMIT)}")
    return write_json(json, {"models": steady})


if __name__ == "__main__":
    typer.run(main)
