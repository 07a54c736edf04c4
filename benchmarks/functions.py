"""What torchax-ops-jtorch pays: functions that it keeps whole, with the pack and without, and others that it leaves alone.

    python benchmarks/functions.py             # --quick for a rough look, --only WORD, --json FILE to keep the figures

Four questions, each answered by ratios from one run, above 1 where the pack is faster: small arguments, for which the way
to an op and back is what counts (fresh processes, with the pack and without, each against a call of JAX's own); large ones
(one process, two environments in turn), eager and as one program; the first call; and the memory that attention takes.
`flex_attention`, which there is not without the pack, is timed with a BlockMask over the same mask in its score_mod.
`--tried` times definitions that were written as an experiment and are not in the pack, as overrides.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
import typer
from common import Json, Quick, block_until_ready, console, interleave, make_table, run_python, write_json
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchax_core
from torchax_core import Config, Environment

WITH, WITHOUT = "with", "without"
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, and what makes its arguments, on CPU: small ones, and large ones."""

    name: str
    function: Callable[..., torch.Tensor]
    small: Callable[[], tuple[torch.Tensor, ...]]
    large: Callable[[], tuple[torch.Tensor, ...]]


def numbers(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Normal numbers in each of the shapes."""
    return tuple(torch.randn(shape) for shape in shapes)


def classes(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and a class for each row."""
    return torch.randn(rows, count), torch.randint(count, (rows,))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def einsum(equation: str) -> Callable[..., torch.Tensor]:
    """torch.einsum of an equation."""
    return lambda *tensors: torch.einsum(equation, *tensors)


CASES = [
    Case(
        "sdpa, length 1024",
        F.scaled_dot_product_attention,
        lambda: numbers(*[(1, 1, 8, 8)] * 3),
        lambda: numbers(*[(1, 8, 1024, 64)] * 3),
    ),
    Case(
        "sdpa, length 128",
        F.scaled_dot_product_attention,
        lambda: numbers(*[(2, 2, 8, 8)] * 3),
        lambda: numbers(*[(4, 8, 128, 64)] * 3),
    ),
    Case(
        "sdpa, causal, length 2048",
        causal,
        lambda: numbers(*[(1, 1, 8, 8)] * 3),
        lambda: numbers(*[(1, 4, 2048, 64)] * 3),
    ),
    Case("cross_entropy", F.cross_entropy, lambda: classes(8, 8), lambda: classes(512, 8000)),
    Case(
        "einsum bij,bjk->bik",
        einsum("bij,bjk->bik"),
        lambda: numbers((2, 8, 8), (2, 8, 8)),
        lambda: numbers((8, 256, 256), (8, 256, 256)),
    ),
    Case(
        "einsum bhid,bhjd->bhij",
        einsum("bhid,bhjd->bhij"),
        lambda: numbers((2, 2, 8, 8), (2, 2, 8, 8)),
        lambda: numbers((4, 8, 256, 64), (4, 8, 256, 64)),
    ),
    Case(
        "einsum bi,bj->bij",
        einsum("bi,bj->bij"),
        lambda: numbers((8, 8), (8, 8)),
        lambda: numbers((64, 256), (64, 256)),
    ),
    Case(
        "one_hot",
        lambda x: F.one_hot(x, 1000),
        lambda: (torch.randint(1000, (8,)),),
        lambda: (torch.randint(1000, (2000,)),),
    ),
]


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return input * jax.lax.rsqrt((input * input).mean(-1, keepdims=True) + eps) * weight


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: bool = True
) -> Any:
    centered = input - input.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + eps) * weight + bias


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enabled: bool = True
) -> Any:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    centered = grouped - grouped.mean(-1, keepdims=True)
    out = centered * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + eps)
    per_channel = (-1, *(1,) * (input.ndim - 2))
    return out.reshape(input.shape) * weight.reshape(per_channel) + bias.reshape(per_channel)


def _conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    pads = [(p, p) for p in padding]
    out = jax.lax.conv_general_dilated(input, weight, stride, pads, dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return out + bias[:, None, None]


def _pad(self: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    return jnp.pad(self, [(0, 0)] * (self.ndim - 1) + [tuple(pad)])


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return input @ weight.T + bias


TRIED = {
    "linear": (
        "aten::linear",
        _linear,
        Case(
            "linear", F.linear, lambda: numbers((8, 8), (8, 8), (8,)), lambda: numbers((512, 512), (512, 512), (512,))
        ),
    ),
    "layer_norm": (
        "aten::layer_norm",
        _layer_norm,
        Case(
            "layer_norm",
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            lambda: numbers((8, 8), (8,), (8,)),
            lambda: numbers((2048, 512), (512,), (512,)),
        ),
    ),
    "rms_norm": (
        "aten::rms_norm",
        _rms_norm,
        Case(
            "rms_norm",
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
            lambda: numbers((8, 8), (8,)),
            lambda: numbers((2048, 512), (512,)),
        ),
    ),
    "group_norm": (
        "aten::group_norm",
        _group_norm,
        Case(
            "group_norm",
            lambda x, w, b: F.group_norm(x, 4, w, b),
            lambda: numbers((2, 8, 4), (8,), (8,)),
            lambda: numbers((8, 64, 32, 32), (64,), (64,)),
        ),
    ),
    "conv2d": (
        "aten::conv2d",
        _conv2d,
        Case(
            "conv2d",
            lambda x, w, b: F.conv2d(x, w, b, padding=1),
            lambda: numbers((1, 1, 8, 8), (1, 1, 3, 3), (1,)),
            lambda: numbers((4, 16, 32, 32), (16, 16, 3, 3), (16,)),
        ),
    ),
    "pad": (
        "aten::pad",
        _pad,
        Case("pad", lambda x: F.pad(x, (1, 2)), lambda: numbers((8, 8)), lambda: numbers((1024, 1024))),
    ),
}


# -- one call in several ways ------------------------------------------------------------------------------------------


def ways(case: Case, make: Callable[[], tuple[torch.Tensor, ...]], *, jit: bool) -> dict[str, Call]:
    """Calls of the function: alone, with gradients recorded, forward and backward, and the latter as one program."""
    tensors = [t.to("jax") for t in make()]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        found: dict[str, Call] = {"forward": lambda: case.function(*tensors)}
        return found | ({"jit": _jitted(case.function, tensors)} if jit else {})
    grad = torch.ones_like(case.function(*tensors))

    def both(*leaves: torch.Tensor) -> Any:
        return torch.autograd.grad(case.function(*leaves), [t for t in leaves if t.requires_grad], grad)

    found = {
        "forward": lambda: case.function(*tensors),
        "recorded": lambda: case.function(*leaves),
        "and backward": lambda: both(*leaves),
    }
    return found | ({"jit": _jitted(both, leaves)} if jit else {})


def _jitted(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Call:
    compiled = torchax_core.jit(function)
    return lambda: compiled(*tensors)


def within(environment: Any, call: Call) -> Call:
    """The call, made in an environment or with an override in force."""

    def run() -> Any:
        with environment:
            return call()

    return run


# -- small: fresh processes, against JAX -------------------------------------------------------------------------------


def work(only: str, rounds: int) -> dict[str, dict[str, float]]:
    """In this process: each way of each case, as a multiple of one jitted addition of JAX's."""
    x = jnp.ones((8, 8))
    add = jax.jit(lambda x: x + 1)
    results = {}
    for case in selected(only):
        contenders = {"jax": lambda: lambda: add(x)}
        contenders |= {name: (lambda call=call: call) for name, call in ways(case, case.small, jit=False).items()}
        timings = interleave(contenders, rounds=rounds, calls=20)
        results[case.name] = {name: timings.ratio(name, "jax") for name in contenders if name != "jax"}
    return results


def measure_small(only: str, processes: int, rounds: int) -> dict[str, dict[str, float]]:
    """How many times longer small calls take without the pack."""
    runs: dict[str, list[Any]] = {WITH: [], WITHOUT: []}
    before = os.environ.get("TORCHAX_PACKS")
    try:
        for index in range(processes):
            for name in (WITH, WITHOUT) if index % 2 == 0 else (WITHOUT, WITH):
                os.environ["TORCHAX_PACKS"] = "-jtorch" if name == WITHOUT else ""
                runs[name].append(run_python([__file__, "--worker", "--only", only, "--rounds", str(rounds)]))
    finally:
        if before is None:
            os.environ.pop("TORCHAX_PACKS", None)
        else:
            os.environ["TORCHAX_PACKS"] = before

    def median(name: str, case: str, way: str) -> float:
        return statistics.median(run[case][way] for run in runs[name])

    return {
        case: {way: median(WITHOUT, case, way) / median(WITH, case, way) for way in found}
        for case, found in runs[WITH][0].items()
    }


# -- large: one process ------------------------------------------------------------------------------------------------


def measure_large(only: str, rounds: int) -> dict[str, dict[str, float]]:
    """How many times longer large calls take without the pack; and the first call of all, with its compilation."""
    environments = {WITH: Environment(), WITHOUT: Environment(Config(blocked_packs=("jtorch",)))}
    results = {}
    for case in selected(only):
        calls = {name: ways(case, case.large, jit=True) for name in environments}
        results[case.name] = compare(calls, environments, rounds)
    return results


def measure_tried(only: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """The same for the definitions of TRIED, small and large; each is put in force for a call by an override."""
    found: dict[str, dict[str, dict[str, float]]] = {"small": {}, "large": {}}
    for name, (op, body, case) in TRIED.items():
        if only not in name:
            continue
        plain, override = Environment(), Environment()
        override.override_op_definition(op, body, is_jax_function=True)
        environments = {WITH: override, WITHOUT: plain}
        for size, make in (("small", case.small), ("large", case.large)):
            calls = {e: ways(case, make, jit=size == "large") for e in environments}
            found[size][name] = compare(calls, environments, rounds, times=20 if size == "small" else 1)
    return found


def compare(
    calls: dict[str, dict[str, Call]], environments: dict[str, Any], rounds: int, times: int = 1
) -> dict[str, float]:
    """Ratios without to with, of each way, and of the first call."""
    ratios: dict[str, float] = {}
    first = {}
    for way in calls[WITH]:
        contenders = {}
        for name, environment in environments.items():
            call = within(environment, calls[name][way])
            if way == "jit":
                start = time.perf_counter()
                block_until_ready(call())
                first[name] = time.perf_counter() - start
            contenders[name] = lambda call=call: call
        ratios[way] = interleave(contenders, rounds=rounds, calls=times, warm_up=2).ratio(WITHOUT, WITH)
    if first:
        ratios["first jit"] = first[WITHOUT] / first[WITH]
    return ratios


# -- the tiles of a BlockMask ------------------------------------------------------------------------------------------


def in_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The last 256 places."""
    return (q >= k) & (q - k < 256)


MASKS = {"causal": lambda b, h, q, k: q >= k, "window of 256": in_window}


def measure_tiles(rounds: int, length: int = 2048) -> dict[str, dict[str, float]]:
    """How many times longer flex_attention takes, as one program, if score_mod hides what a BlockMask leaves out."""
    shape = (1, 4, length, 64)
    leaves = [t.to("jax").requires_grad_() for t in numbers(shape, shape, shape)]
    found: dict[str, dict[str, float]] = {}
    for name, mask_mod in MASKS.items():
        mask = create_block_mask(mask_mod, None, None, length, length, device="jax")

        def hidden(score: Any, b: Any, h: Any, q: Any, k: Any, mask_mod: Any = mask_mod) -> Any:
            return torch.where(mask_mod(b, h, q, k), score, -torch.inf)

        row = found[f"flex_attention, {name}, length {length}"] = {}
        for way, make in (("forward", flex_forward), ("and backward", flex_gradients)):
            tiled, whole = (_jitted(make(given), leaves) for given in ({"block_mask": mask}, {"score_mod": hidden}))
            contenders = {WITH: _given(tiled), WITHOUT: _given(whole)}
            row[way] = interleave(contenders, rounds=rounds, calls=1, warm_up=2).ratio(WITHOUT, WITH)
    return found


def _given(call: Call) -> Callable[[], Call]:
    return lambda: call


def flex_forward(options: dict[str, Any]) -> Callable[..., Any]:
    """Flex attention, with no gradients recorded."""

    def run(*tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            return flex_attention(*tensors, **options)

    return run


def flex_gradients(options: dict[str, Any]) -> Callable[..., Any]:
    """Gradients of flex attention, and it before."""
    return lambda *tensors: torch.autograd.grad(flex_attention(*tensors, **options).square().sum(), tensors)


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(length: int) -> float:
    """Megabytes by which this process grows in a forward and backward of attention, eager, one head."""
    q, k, v = (torch.randn(1, 1, length, 64, device="jax", requires_grad=True) for _ in range(3))
    small = [t[:, :, :64].detach().requires_grad_() for t in (q, k, v)]
    torch.autograd.grad(F.scaled_dot_product_attention(*small).sum(), small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    block_until_ready(torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v)))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def measure_memory(lengths: list[int]) -> dict[str, dict[str, float]]:
    """Megabytes that attention of each length takes beyond its inputs, with the pack and without, in fresh processes."""
    found = {}
    for length in lengths:
        found[str(length)] = {}
        for name in (WITH, WITHOUT):
            code = [__file__, "--memory", str(length)]
            found[str(length)][name] = _run(code, "-jtorch" if name == WITHOUT else "")
    return found


def _run(arguments: list[str], packs: str) -> Any:
    os.environ["TORCHAX_PACKS"] = packs
    try:
        return run_python(arguments)
    finally:
        os.environ.pop("TORCHAX_PACKS")


# -- the tables --------------------------------------------------------------------------------------------------------


def selected(only: str) -> list[Case]:
    """The cases whose names have the word."""
    return [case for case in CASES if only in case.name]


def show(title: str, results: dict[str, dict[str, float]], form: str = "{:.2f}") -> None:
    """A table of ratios, a row per function."""
    columns = list(dict.fromkeys(way for row in results.values() for way in row))
    table = make_table(title, ["", *columns])
    for name, row in results.items():
        table.add_row(name, *(form.format(row[way]) if way in row else "" for way in columns))
    console.print(table)


def main(
    quick: Quick = False,
    json: Json = None,
    only: Annotated[str, typer.Option(help="Only functions whose names have this word.")] = "",
    tried: Annotated[bool, typer.Option("--tried", help="Time the definitions that are not in the pack.")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    rounds: Annotated[int, typer.Option(hidden=True)] = 0,
    memory: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Time functions with and without torchax-ops-jtorch."""
    torch.manual_seed(0)
    if worker or memory:
        import json as writer

        sys.stdout.write(writer.dumps(work(only, rounds) if worker else peak(memory)) + "\n")
        return
    figures: dict[str, Any] = {}
    if tried:
        figures = measure_tried(only, 5 if quick else 15)
        for size, results in figures.items():
            show(f"Not in the pack, {size}: without / with", results)
    else:
        figures["small"] = measure_small(only, 1 if quick else 3, 7 if quick else 51)
        show("Small arguments: without / with the pack", figures["small"])
        figures["large"] = measure_large(only, 3 if quick else 9)
        show("Large arguments: without / with the pack", figures["large"])
        if only in "flex_attention":
            figures["tiles"] = measure_tiles(3 if quick else 9)
            show("A mask in score_mod / in a BlockMask", figures["tiles"])
        if only in "sdpa":
            figures["memory"] = measure_memory([4096] if quick else [4096, 8192])
            show("MB that attention takes beyond its inputs, by length", figures["memory"], "{:.0f}")
    write_json(json, figures)


if __name__ == "__main__":
    typer.run(main)
