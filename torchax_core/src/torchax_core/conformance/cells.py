"""What is checked: a cell is one op in one dtype and mode; its result says how that went."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

import torch

from torchax_core.conformance.ops import ops_of

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = [
    "ALL_MODES",
    "DTYPES",
    "FAILED",
    "MODES",
    "NO_DTYPE",
    "Cell",
    "Result",
    "cells",
    "dtypes_named",
    "modes_named",
]

MODES = ("forward", "inplace", "out", "grad.first", "grad.second", "grad.forward", "view", "vmap", "error")
ALL_MODES = (*MODES, "compile")
"""Those that run unless others are named, and those that there are."""
"""Every mode. "grad" stands for the three that begin with it: first order, second order, and forward-mode AD."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""What "all" stands for in a list of dtypes."""

FAILED = ("failed", "timeout", "crashed")
"""The statuses that make a cell red."""

NO_DTYPE = "-"
_DOUBLES = (torch.float64, torch.complex128)
_GRAD_MODES = ("grad.first", "grad.second", "grad.forward")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One op (OpInfo's full name), dtype ("float32"; "-" in mode "error") and mode."""

    op: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.mode}"


@dataclasses.dataclass
class Result:
    """How a cell went.

    status:      "passed", "failed", "timeout", "crashed", or "none": no sample applies.
    samples:     how many were compared; checking ends at the first that fails.
    message, detail: one line on what is wrong, and the rest of it.
    sample:      the failing sample's arguments.
    definitions: "aten::exp: file:line" of what ran in the failing sample.
    compiles, compile_seconds, longest_compile: XLA's share of `seconds`.
    """

    cell: Cell
    status: str
    samples: int = 0
    seconds: float = 0.0
    message: str = ""
    detail: str = ""
    sample: str = ""
    definitions: list[str] = dataclasses.field(default_factory=list)
    compiles: int = 0
    compile_seconds: float = 0.0
    longest_compile: float = 0.0


def dtypes_named(text: str) -> list[torch.dtype]:
    """The dtypes of a comma-separated list, in which "all" stands for DTYPES. Raises ValueError for an unknown name."""
    found: list[torch.dtype] = []
    for name in filter(None, map(str.strip, text.split(","))):
        dtype = getattr(torch, name, None)
        if name == "all":
            found += DTYPES
        elif isinstance(dtype, torch.dtype):
            found.append(dtype)
        else:
            raise ValueError(f"{name!r} is no torch dtype; say 'float32', 'int64' or 'all'")
    return list(dict.fromkeys(found))


def modes_named(text: str) -> list[str]:
    """The modes of a comma-separated list; "grad" stands for its three parts. Raises ValueError for an unknown name."""
    found: list[str] = []
    for name in filter(None, map(str.strip, text.split(","))):
        if name == "grad":
            found += _GRAD_MODES
        elif name == "errors":
            found.append("error")
        elif name in ALL_MODES:
            found.append(name)
        else:
            raise ValueError(f"modes are {', '.join(ALL_MODES)}, and grad, but this is not: {name!r}")
    return list(dict.fromkeys(found))


def cells(
    ops: str = "", dtypes: str = "all", modes: str = ",".join(MODES), pack: str | None = None, shard: str = "1/1"
) -> list[Cell]:
    """All cells there are for these choices, those of one op and dtype together.

    ops:   a regular expression, searched for in the ops' full names.
    pack:  only what the pack brings or defines (see `ops_of`).
    shard: "i/n": every n-th op, from the i-th (from 1) on.
    Raises ValueError for a wrong choice.
    """
    wanted, wanted_modes = dtypes_named(dtypes), modes_named(modes)
    part = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if part is None or int(part[1]) > int(part[2]):
        raise ValueError(f"--shard is i/n with 1 <= i <= n, as 2/4, not {shard!r}")
    try:
        search = re.compile(ops).search
    except re.error as error:
        raise ValueError(f"--ops {ops!r} is no regular expression: {error}") from None
    chosen = [op for name, op in ops_of(pack).items() if search(name)]
    found = []
    for op in chosen[int(part[1]) - 1 :: int(part[2])]:
        for dtype, mode in itertools.product([*wanted, None], wanted_modes):
            if _applies(op, dtype, mode, wanted):
                name = NO_DTYPE if dtype is None else str(dtype).removeprefix("torch.")
                found.append(Cell(op.full_name, name, mode))
    return found


def _applies(op: OpInfo, dtype: torch.dtype | None, mode: str, wanted: list[torch.dtype]) -> bool:
    if mode == "error" or dtype is None:
        return mode == "error" and dtype is None and op.error_inputs_func is not None
    if mode == "inplace" and op.inplace_variant is None or mode == "out" and not op.supports_out:
        return False
    if mode == "vmap":  # one dtype says all about batching
        return dtype == next(
            (x for x in (torch.float32, *wanted) if x in wanted and x in op.supported_dtypes("cpu")), None
        )
    if mode == "compile":  # with gradients: the doubles, of an op that has them
        possible = [x for x in wanted if x in op.supported_dtypes("cpu")]
        return dtype in ([x for x in possible if x in _DOUBLES] or possible[:1])
    if mode not in _GRAD_MODES:
        return dtype in op.supported_dtypes("cpu")
    if mode == "grad.second" and not op.supports_gradgrad or mode == "grad.forward" and not op.supports_forward_ad:
        return False
    # gradients are compared in double precision, where the op and the choice of dtypes have it
    possible = [x for x in wanted if x in op.supported_backward_dtypes("cpu")] if op.supports_autograd else []
    doubles = [x for x in possible if x in _DOUBLES]
    return dtype in (doubles or possible)
