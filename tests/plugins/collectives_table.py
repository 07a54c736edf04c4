"""Collectives of device "jax" against gloo's: `python tests/plugins/collectives_table.py --table`.

The cases of collectives_cases.py run with the same ranks in several places: gloo processes on the CPU, the reference; the
devices of a jax.shard_map; processes under jax.distributed, there also inside torchax_core.jit; and all of these again with
four members. Values, shapes and dtypes must be equal. Where gloo lacks something (PREMUL_SUM, bools), the reduction's
definition is the reference.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from collectives_cases import Case, Tensors, cases, defined

Outcome = Tensors | str
"""What a case gave: tensors on the CPU, or the error it raised."""


def start(rank: int, members: int, port: int) -> None:
    """The environment of torch.distributed's env:// rendezvous."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(members), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def attempt(case: Case, x: torch.Tensor, members: int) -> Outcome:
    try:
        return [t.detach().cpu() for t in case.body(x, members)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# -- the places ----------------------------------------------------------------------------------


def as_process(backend: str, rank: int, members: int, port: int, full: bool) -> dict[str, Outcome]:
    """This process is one member."""
    start(rank, members, port)
    if backend == "jax":
        import torchax_core  # noqa: F401  # makes the device
    dist.init_process_group(backend)
    device = "jax" if backend == "jax" else "cpu"
    found = {case.key: attempt(case, case.input(rank, members).to(device), members) for case in cases(full)}
    if backend == "jax":
        found |= jitted(rank, members, full)
    dist.barrier()
    dist.destroy_process_group()
    return found


JITTED = "in jit: "
NOT_JITTED = ("unequal", "isend", "recv", "refusals", "objects", "new_group", "whole step")
"""Cases that need values on the host, make groups, or are of jitted functions as they are."""


def jitted(rank: int, members: int, full: bool) -> dict[str, Outcome]:
    """The cases inside torchax_core.jit, thirty in a program; those that train make a program of each step themselves."""
    from training_cases import training

    import torchax_core

    train = {case.name for case in training(True)}
    some = [c for c in cases(full) if c.name not in train and not any(name in c.name for name in NOT_JITTED)]
    found: dict[str, Outcome] = {}
    for part in (some[i : i + 30] for i in range(0, len(some), 30)):
        program = torchax_core.jit(functools.partial(_all, part, found, members))
        results = program({c.key: c.input(rank, members).to("jax") for c in part})
        found |= {JITTED + key: [t.detach().cpu() for t in tensors] for key, tensors in results.items()}
    return found


def _all(
    part: list[Case], found: dict[str, Outcome], members: int, inputs: dict[str, torch.Tensor]
) -> dict[str, Tensors]:
    results: dict[str, Tensors] = {}
    for case in part:
        try:
            results[case.key] = case.body(inputs[case.key], members)
        except Exception as error:
            found[JITTED + case.key] = f"{type(error).__name__}: {error}"
    return results


def as_devices(members: int, full: bool) -> list[dict[str, Outcome]]:
    """The devices of this process are the members: one program, all cases in it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import torchax_ops_c10d
    from torchax_core.interop import jax_view

    torchax_ops_c10d.init_single_process(members)
    mesh = jax.make_mesh((members,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:members])
    some = [case for case in cases(full) if not case.ranked]
    stacked = {c.key: torch.stack([c.input(r, members) for r in range(members)]).to("jax").jax() for c in some}
    errors: dict[str, str] = {}

    def per_device(inputs: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for case in some:
            try:
                results[case.key] = jax_view(lambda x, c=case: c.body(x, members))(inputs[case.key][0])
            except Exception as error:
                errors[case.key] = f"{type(error).__name__}: {error}"
        return jax.tree.map(lambda y: y[None], results)

    program = jax.shard_map(per_device, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    results = jax.jit(program)(stacked)
    found: list[dict[str, Outcome]] = []
    from torchax_core import tensor

    for rank in range(members):
        ours: dict[str, Outcome] = {k: [tensor(jnp.asarray(y)[rank]).cpu() for y in ys] for k, ys in results.items()}
        found.append(ours | errors)
    dist.destroy_process_group()
    return found


def launch(place: str, members: int, full: bool) -> list[dict[str, Outcome]]:
    """Run a place in processes of its own; what every rank found."""
    alone = place != "processes"
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        count = 1 if alone else members
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={members if place == 'devices' else 1}"
        outputs = [Path(folder) / str(rank) for rank in range(count)]
        running = []
        for rank, output in enumerate(outputs):
            command = [sys.executable, __file__, "--place", place, "--rank", str(rank), "--members", str(members)]
            command += ["--port", str(port), "--output", str(output), *(["--full"] if full else [])]
            log = output.with_suffix(".log").open("w")
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait(timeout=1800) for process in running]
        if any(codes):
            logs = "\n".join(output.with_suffix(".log").read_text()[-2000:] for output in outputs)
            raise RuntimeError(f"{place}, {members} members: exit codes {codes}\n{logs}")
        found = [pickle.loads(output.read_bytes()) for output in outputs]
    return found[0] if alone else found  # type: ignore[return-value]


# -- the comparison ------------------------------------------------------------------------------


def reference(case: Case, gloo: list[dict[str, Outcome]]) -> tuple[str, list[Outcome]]:
    """What every rank is to find, and who says so."""
    found = [ranks[case.key] for ranks in gloo]
    if not any(isinstance(outcome, str) for outcome in found):
        return "gloo", found
    if case.reduction is None:
        return "gloo raises", found
    members = len(gloo)
    result = defined(case.reduction, torch.stack([case.input(r, members) for r in range(members)]))
    if "reduce_scatter" in case.name:
        parts = [[part] * (2 if case.name == "reduce_scatter_tensor" else 1) for part in result.chunk(members)]
        return "definition", list(parts)
    return "definition", [[result]] * members


def difference(found: Outcome, expected: Outcome, rounded: float) -> str | None:
    """How they differ, if they do."""
    if isinstance(found, str):
        return found
    if isinstance(expected, str):
        return f"works, but gloo raises {expected}"
    if len(found) != len(expected):
        return f"{len(found)} results, not {len(expected)}"
    for mine, theirs in zip(found, expected, strict=True):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"{mine.dtype} of shape {tuple(mine.shape)}, not {theirs.dtype} of shape {tuple(theirs.shape)}"
        if not (
            torch.allclose(mine, theirs, rtol=rounded, atol=rounded / 10) if rounded else torch.equal(mine, theirs)
        ):
            return f"values differ: {mine.flatten()[:4].tolist()}, not {theirs.flatten()[:4].tolist()}"
    return None


def compare(
    places: list[tuple[str, int]], full: bool
) -> tuple[list[Case], dict[str, str], dict[str, dict[str, str | None]]]:
    """The cases, the source of each one's reference, and for each place and case the difference."""
    gloo = {members: launch("gloo", members, full) for members in {m for _, m in places}}
    differences: dict[str, dict[str, str | None]] = {}
    sources: dict[str, str] = {}
    for place, members in places:
        found = launch(place, members, full)
        for prefix in ("", JITTED) if place == "processes" else ("",):
            column = differences[f"{'in jit' if prefix else place} {members}"] = {}
            for case in cases(full):
                if prefix + case.key not in found[0]:
                    continue
                sources[case.key], expected = reference(case, gloo[members])
                if sources[case.key] == "gloo raises":
                    continue  # nothing to compare with
                ranks = range(members) if case.root is None else [case.root]
                faults = (difference(found[rank][prefix + case.key], expected[rank], case.rounded) for rank in ranks)
                column[case.key] = next((fault for fault in faults if fault is not None), None)
    return cases(full), sources, differences


def print_table(places: list[tuple[str, int]]) -> int:
    """One line for each call and reduction; how many dtypes are equal. Returns how many cases differ."""
    some, sources, differences = compare(places, full=True)
    rows: dict[tuple[str, str], list[Case]] = {}
    for case in some:
        rows.setdefault((case.name, case.reduction or ""), []).append(case)
    columns = list(differences)
    print(f"{'call':30}{'reduction':12}{'dtypes':>7}  {'reference':28}" + "".join(f"{c:>14}" for c in columns))
    for (name, reduction), group in rows.items():
        by = [sources[case.key] for case in group]
        told = ", ".join(f"{source} {by.count(source)}" for source in dict.fromkeys(by))
        line = f"{name:30}{reduction:12}{len(group):7}  {told:28}"
        for column in columns:
            run = [case for case in group if case.key in differences[column]]
            equal = sum(differences[column][case.key] is None for case in run)
            line += f"{f'{equal} equal' if run else '-':>14}"
        print(line)
    faults = [(c, key, fault) for c in columns for key, fault in differences[c].items() if fault is not None]
    for column, key, fault in faults:
        print(f"{column}: {key}: {fault[:300]}")
    print(f"{sum(map(len, differences.values()))} comparisons, {len(faults)} differ")
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the comparison of every call, reduction and dtype")
    every = ("devices:2", "devices:4", "processes:2", "processes:4")
    parser.add_argument("--places", nargs="*", default=every, help=f"where to, default: {' '.join(every)}")
    parser.add_argument("--place", choices=("gloo", "processes", "devices"))
    for name in ("rank", "members", "port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    if options.table:
        places = [(place, int(members)) for place, _, members in (p.partition(":") for p in options.places)]
        return int(print_table(places) > 0)
    if options.place == "devices":
        found: Any = as_devices(options.members, options.full)
    elif options.place == "gloo":
        arguments = [("gloo", rank, options.members, options.port, options.full) for rank in range(options.members)]
        with multiprocessing.get_context("fork").Pool(options.members) as pool:  # they need not import torch again
            found = pool.starmap(as_process, arguments, chunksize=1)
    else:
        found = as_process("jax", options.rank, options.members, options.port, options.full)
    options.output.write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
