"""Checkpoints: any pytree of tensors, modules and optimizers, with the random state, to a folder and back, bit for bit.

    save_checkpoint({"model": model, "optimizer": optimizer}, "runs/1", step)
    load_checkpoint("runs/1", into={"model": model, "optimizer": optimizer})

The folder holds one folder a step. One that is being written has a name that loading does not look at, and gets its own in
one rename: whenever the process is killed, what was saved before can be read. Arrays are written by orbax, shard by
shard; the rest is one JSON file. Needs `pip install torchax-core[checkpoints]`.
Source: https://orbax.readthedocs.io/en/latest/
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import pathlib
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax_core import processes
from torchax_core.convert import array_from_torch, torch_from_array
from torchax_core.dtypes import torch_dtype
from torchax_core.environment import current_env
from torchax_core.errors import CheckpointError
from torchax_core.tensor import Tensor, wrap_array

__all__ = ["Save", "latest_step", "load_checkpoint", "put_into", "save_checkpoint"]

_FORMAT = "torchax checkpoint"
_VERSION = 1
_MANIFEST = "torchax.json"
_STEP = re.compile(r"(\d{8,})\.(\d+)")
_one_at_a_time = threading.Lock()
_under_way: set[pathlib.Path] = set()


class _NotThere(CheckpointError, FileNotFoundError):
    """No checkpoint where one is looked for."""


class Save:
    """A save under way. `wait()` returns when it is on disk, and raises what went wrong; `done()` tells without waiting."""

    def __init__(self, folder: pathlib.Path, run: Callable[[], None], *, background: bool) -> None:
        self.path = folder
        self._error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._guarded, name="torchax-checkpoint") if background else None
        if self._thread is None:
            run()
        else:
            self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> pathlib.Path:
        """The checkpoint's folder, once it is complete."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path


def save_checkpoint(
    state: Any, path: str | os.PathLike[str], step: int, *, wait: bool = True, keep: int | None = None
) -> Save:
    """Save `state` as step `step` in the folder `path`, beside the steps that are there; the same step is replaced.

    state: nested dicts, lists, tuples and namedtuples of tensors (on any device), arrays, numbers, strings, dtypes, None, and of
           objects with state_dict() (modules, optimizers, schedulers). torch's random state and the environment's go with it.
    wait:  False: return at once and write in the background; what was given may be changed meanwhile. Call `.wait()` of the
           result before the program ends. Takes the device memory of a copy until it is done.
    keep:  how many of the latest steps to keep; None: all.
    Where jax runs in several processes, each calls this with the same arguments, on a file system that all share: of arrays that
    lie on devices of all, each writes its shards; of all else the first's values are saved; random states are each its own.
    Raises CheckpointError for a value it cannot save, or if `path` is a file.
    """
    _orbax()
    root = pathlib.Path(path).absolute()
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"save_checkpoint needs a folder, but {root} is a file. Give the folder to make.")
    arrays: list[Any] = []
    manifest: dict[str, Any] = {
        "step": int(step),
        "state": _encode(state, arrays, "state"),
        "random": _encode(_random_state(), arrays, "random"),
    }
    manifest["arrays"] = [{"shape": list(a.shape), "dtype": str(a.dtype)} for a in arrays]
    meeting = processes.Meeting()
    with _one_at_a_time:
        name, failed = None, None
        if processes.is_first():
            try:
                name = _begin(root, int(step))
            except OSError as error:
                failed = error
        folder = root / meeting.tell(name, failed)
    started = _started(folder)
    if not wait:
        with jax.enable_x64(True):
            arrays = [jnp.copy(array) for array in arrays]  # jax_jit may be told to give up the old ones

    def run() -> None:
        with _one_at_a_time:
            try:
                _write(started, folder, manifest, arrays, meeting)
            finally:
                _under_way.discard(started)
            if processes.is_first():
                _tidy(root, keep)

    return Save(folder, run, background=not wait)


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The highest step with a complete checkpoint in the folder `path`; None if there is none."""
    return max((step for step, _, _ in _complete(pathlib.Path(path))), default=None)


def load_checkpoint(path: str | os.PathLike[str], step: int | None = None, *, into: Any = None) -> Any:
    """The state saved in the folder `path`, the latest step or `step`; tensors in it are jax arrays.

    into: what was given to save_checkpoint, or as much of it as is wanted. Modules, optimizers and others with
          load_state_dict() take up their state, tensors their values (laid out over devices as they are), and torch's and
          the environment's random state go back to what they were. All of it happens, or none.
    path: may also be the folder of one step, or a file written by torch.save, which is read with weights_only=True.
    Raises CheckpointError for what is no checkpoint (also a FileNotFoundError where there is none), is damaged, or does not fit
    `into`; nothing has changed then.
    """
    root = pathlib.Path(path).absolute()
    if root.is_file():
        state = _read_torch_file(root)
        return _to_arrays(state) if into is None else put_into(into, state, None)
    folder = _find(root, step)
    manifest = _read_manifest(folder)
    _verify(folder, manifest)
    wanted: dict[int, Any] = {}
    if into is not None:
        _shardings(into, manifest["state"], [tuple(fact["shape"]) for fact in manifest["arrays"]], wanted)
    arrays = _read_arrays(folder, manifest, wanted)
    if into is None:
        return _to_arrays(_decode(manifest["state"], arrays))
    random = _own_random_state(folder) or _decode(manifest["random"], arrays)
    return put_into(into, _decode(manifest["state"], arrays), random)


# -- values and JSON -------------------------------------------------------------------------------


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _encode(value: Any, arrays: list[Any], where: str) -> Any:
    """A value as JSON, its arrays put into `arrays`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if isinstance(value, int) or np.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        return _array("jax", value.detach().jax(), arrays)
    if isinstance(value, torch.Tensor):
        return _array("cpu", array_from_torch(value.detach().cpu()), arrays)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return _array("numpy", np.array(value), arrays)
    if isinstance(value, jax.Array) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return _array("array", value, arrays)
    if isinstance(value, jax.Array):
        return {"key": str(jax.random.key_impl(value)), "data": _encode(jax.random.key_data(value), arrays, where)}
    if _is_stateful(value):
        return {"stateful": _encode(value.state_dict(), arrays, where)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int, float, bool, type(None))):
                raise CheckpointError(
                    f"save_checkpoint: {where} has a key of type {type(key).__name__}; use strings or numbers."
                )
        return {"dict": [[key, _encode(item, arrays, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"fields": [[n, _encode(getattr(value, n), arrays, f"{where}.{n}")] for n in value._fields]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    raise CheckpointError(
        f"save_checkpoint: {where} is a {type(value).__name__}, which it cannot save. Give it as dicts, lists, tuples, tensors, "
        "numbers and strings, or as an object with state_dict() and load_state_dict()."
    )


def _array(kind: str, array: Any, arrays: list[Any]) -> dict[str, Any]:
    arrays.append(array)
    return {"array": len(arrays) - 1, "kind": kind}


def _decode(code: Any, arrays: list[Any]) -> Any:
    """The value again: tensors where and what they were, namedtuples as dicts, objects as their state."""
    if not isinstance(code, dict):
        return code
    (what, content), *more = code.items()
    if what == "array":
        return _of_kind(dict(more)["kind"], arrays[content])
    if what == "key":
        return jax.random.wrap_key_data(_decode(dict(more)["data"], arrays), impl=content)
    if what == "float":
        return float(content)
    if what == "complex":
        return complex(float(content[0]), float(content[1]))
    if what == "bytes":
        return base64.b64decode(content)
    if what == "dtype":
        return getattr(torch, content)
    if what == "stateful":
        return _decode(content, arrays)
    if what in ("dict", "fields"):
        return {key: _decode(item, arrays) for key, item in content}
    items = [_decode(item, arrays) for item in content]
    return items if what == "list" else tuple(items)


def _of_kind(kind: str, array: jax.Array) -> Any:
    if kind == "jax":
        return wrap_array(array)
    if kind == "cpu":
        return torch_from_array(array)
    return np.asarray(array) if kind == "numpy" else array


def _to_arrays(value: Any) -> Any:
    """`value` with its tensors as jax arrays."""
    if isinstance(value, Tensor):
        return value.jax()
    if isinstance(value, torch.Tensor):
        return array_from_torch(value)
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_to_arrays(item) for item in value])
    return value


# -- files -----------------------------------------------------------------------------------------


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints are written by orbax: `pip install torchax-core[checkpoints]`.") from error
    return orbax.checkpoint


def _started(folder: pathlib.Path) -> pathlib.Path:
    """The name of a checkpoint's folder while it is written."""
    return folder.with_name(f".{folder.name}.saving")


def _begin(root: pathlib.Path, step: int) -> str:
    """Make the folder that a step is written to, and remove those of processes that were killed. The name it will have."""
    root.mkdir(parents=True, exist_ok=True)
    for _, _, folder in _folders(root):
        if folder.name.startswith(".") and folder not in _under_way:
            shutil.rmtree(folder)
    number = max((n for s, n, _ in _folders(root) if s == step), default=-1) + 1
    started = _started(root / f"{step:08d}.{number}")
    started.mkdir()  # takes the name, for a save that starts before this one is done
    _under_way.add(started)
    return f"{step:08d}.{number}"


def _folders(root: pathlib.Path) -> list[tuple[int, int, pathlib.Path]]:
    """(step, how often it was saved before, folder), those being written too, in the order they supersede each other."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(".saving"))
        if match and folder.is_dir():
            found.append((int(match[1]), int(match[2]), folder))
    return sorted(found)


def _complete(root: pathlib.Path) -> list[tuple[int, int, pathlib.Path]]:
    return [entry for entry in _folders(root) if not entry[2].name.startswith(".")]


def _write(
    started: pathlib.Path, folder: pathlib.Path, manifest: dict[str, Any], arrays: list[Any], meeting: processes.Meeting
) -> None:
    ocp = _orbax()
    # orbax writes no empty ones
    named = {f"{i:06d}": processes.everywhere(array) for i, array in enumerate(arrays) if array.size}
    if named:
        handler, together = ocp.StandardCheckpointHandler(), processes.options(f"torchax_{meeting.number}")
        with contextlib.closing(ocp.Checkpointer(handler, multiprocessing_options=together)) as writer:
            writer.save(started / "arrays", args=ocp.args.StandardSave(named), force=True)
    if processes.several():
        random = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in _random_state().items()}
        (started / f"random.{jax.process_index()}.json").write_text(json.dumps(random))
        meeting.gather("written")
    failed = None
    if processes.is_first():
        try:
            _complete_folder(started, folder, manifest)
        except OSError as error:
            failed = error
    meeting.tell(folder.name, failed)


def _complete_folder(started: pathlib.Path, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, and give the folder its name."""
    manifest["files"] = {name: [file.stat().st_size, _crc(file)] for name, file in _files(started).items()}
    body = json.dumps(manifest)
    with open(started / _MANIFEST, "w") as file:
        header = {"format": _FORMAT, "version": _VERSION, "crc32": zlib.crc32(body.encode())}
        file.write(f"{json.dumps(header)}\n{body}\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(started, folder)


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files in a folder and those below, by their path from it."""
    return {f.relative_to(folder).as_posix(): f for f in sorted(folder.rglob("*")) if f.is_file()}


def _crc(file: pathlib.Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while piece := stream.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def _verify(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    there = _files(folder)
    for name, (size, crc) in manifest["files"].items():
        if name not in there:
            raise CheckpointError(f"load_checkpoint: {folder / name} is missing. {_DAMAGED}")
        found = there[name].stat().st_size
        if found != size:
            raise CheckpointError(f"load_checkpoint: {folder / name} has {found} bytes, not {size}. {_DAMAGED}")
        if _crc(there[name]) != crc:
            raise CheckpointError(f"load_checkpoint: {folder / name} was altered: its checksum is another. {_DAMAGED}")


def _tidy(root: pathlib.Path, keep: int | None) -> None:
    """Remove what a later save of the same step supersedes, and steps beyond those to keep."""
    complete = _complete(root)
    last = {step: folder for step, _, folder in complete}
    kept = sorted(last)[-keep:] if keep else sorted(last)
    for step, _, folder in complete:
        if folder != last[step] or step not in kept:
            shutil.rmtree(folder)


def _find(root: pathlib.Path, step: int | None) -> pathlib.Path:
    if (root / _MANIFEST).is_file():
        return root
    complete = _complete(root)
    found = [folder for s, _, folder in complete if step is None or s == step]
    if found:
        return found[-1]
    if not root.exists():
        raise _NotThere(f"load_checkpoint: {root} does not exist.")
    there = sorted({s for s, _, _ in complete})
    if there:
        raise _NotThere(f"load_checkpoint: no step {step} in {root}; there are {', '.join(map(str, there))}.")
    raise _NotThere(
        f"load_checkpoint: no checkpoint in {root}. save_checkpoint(state, path, step) writes folders of names like "
        "00000100.0 into it; weights in safetensors files are read by load_safetensors."
    )


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    file = folder / _MANIFEST
    try:
        first, _, body = file.read_text().partition("\n")
        header = json.loads(first)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"load_checkpoint: {file} cannot be read: {error}. {_DAMAGED}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise CheckpointError(f"load_checkpoint: {file} was not written by save_checkpoint.")
    if header["version"] > _VERSION:
        raise CheckpointError(
            f"load_checkpoint: {folder} has format version {header['version']}, and this torchax_core reads up to {_VERSION}. "
            "Update torchax-core."
        )
    body = body.removesuffix("\n")
    if zlib.crc32(body.encode()) != header["crc32"]:
        raise CheckpointError(f"load_checkpoint: {file} was altered or cut off. {_DAMAGED}")
    return json.loads(body)  # type: ignore[no-any-return]


_DAMAGED = "The checkpoint is damaged; an earlier step may be whole: load_checkpoint(path, step)."


def _read_arrays(folder: pathlib.Path, manifest: dict[str, Any], shardings: dict[int, Any]) -> list[Any]:
    """The arrays, each laid out as asked for, else on the default device."""
    ocp = _orbax()
    facts = manifest["arrays"]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        checkpointer = ocp.Checkpointer(
            ocp.StandardCheckpointHandler(), multiprocessing_options=processes.options("torchax_load")
        )
        with jax.enable_x64(True), contextlib.closing(checkpointer) as reader:
            abstract = {
                f"{i:06d}": jax.ShapeDtypeStruct(
                    tuple(fact["shape"]), np.dtype(fact["dtype"]), sharding=processes.reading(shardings.get(i, here))
                )
                for i, fact in enumerate(facts)
                if 0 not in fact["shape"]
            }
            found = reader.restore(folder / "arrays", args=ocp.args.StandardRestore(abstract)) if abstract else {}
            arrays = [
                _placed(found[f"{i:06d}"], shardings.get(i, here))
                if f"{i:06d}" in found
                else jnp.zeros(fact["shape"], np.dtype(fact["dtype"]))
                for i, fact in enumerate(facts)
            ]
            jax.block_until_ready(arrays)
    except (
        Exception
    ) as error:  # orbax and tensorstore raise what their layers raise: ValueError, OSError, XlaRuntimeError...
        raise CheckpointError(f"load_checkpoint: the arrays in {folder} cannot be read: {error}. {_DAMAGED}") from error
    for i, (array, fact) in enumerate(zip(arrays, facts, strict=True)):
        if list(array.shape) != fact["shape"] or str(array.dtype) != fact["dtype"]:
            raise CheckpointError(
                f"load_checkpoint: array {i} in {folder} is {array.dtype}{list(array.shape)}, but {fact['dtype']}{fact['shape']} "
                f"was saved. {_DAMAGED}"
            )
    return arrays


def _placed(array: jax.Array, sharding: Any) -> jax.Array:
    """What was read, where it is to lie."""
    if processes.several() and sharding.is_fully_addressable:
        return processes.locally(array, sharding)
    return array


def _own_random_state(folder: pathlib.Path) -> dict[str, torch.Tensor] | None:
    """The random state that this process had, if it was one of several that saved; None if that is the one in the manifest."""
    file = folder / f"random.{jax.process_index()}.json"
    if not processes.several() or not file.is_file():
        return None
    content = json.loads(file.read_text())
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) for name, data in content.items()
    }


def _read_torch_file(file: pathlib.Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip raise a dozen kinds
        raise CheckpointError(
            f"load_checkpoint: {file} is no file that torch.load can read with weights_only=True: {error}"
        ) from error


# -- taking it up ----------------------------------------------------------------------------------


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "jax": current_env().random.get_state()}


def _shardings(into: Any, code: Any, shapes: list[tuple[int, ...]], wanted: dict[int, Any]) -> None:
    """How the arrays of `code`, of these shapes, are laid out in what takes them up, by their number."""
    target = into.state_dict() if _is_stateful(into) else into
    content: Any
    what, content = next(iter(code.items())) if isinstance(code, dict) else ("", None)
    if what == "stateful":
        _shardings(target, content, shapes, wanted)
        if isinstance(into, torch.optim.Optimizer):
            _shardings({"state": _state_like_parameters(into, content, shapes)}, content, shapes, wanted)
    elif what == "array" and isinstance(target, (Tensor, jax.Array)):
        array = target.detach().jax() if isinstance(target, Tensor) else target
        wanted[content] = array.sharding
    elif what in ("dict", "fields"):
        for key, item in content:
            inner = getattr(target, key, None) if what == "fields" and not isinstance(target, dict) else None
            if inner is None and isinstance(target, dict):
                inner = target.get(key)
            if inner is not None:
                _shardings(inner, item, shapes, wanted)
    elif what in ("list", "tuple") and isinstance(target, (list, tuple)):
        for inner, item in zip(target, content, strict=False):
            _shardings(inner, item, shapes, wanted)


def _state_like_parameters(optimizer: Any, code: Any, shapes: list[tuple[int, ...]]) -> dict[Any, Any]:
    """In the place of an optimizer's state, which there may be none of yet, the parameters that it is to lie like."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    entries = dict(code["dict"]).get("state", {}).get("dict", ())
    return {
        number: {
            name: parameters[number]
            for name, item in entry.get("dict", ())
            if isinstance(item, dict) and "array" in item and shapes[item["array"]] == tuple(parameters[number].shape)
        }
        for number, entry in entries
        if number in parameters and isinstance(entry, dict)
    }


def put_into(into: Any, state: Any, random: Any) -> Any:
    """Check all of it, then change all of it; undo if something fails in between."""
    steps: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
    result = _match(into, state, "state", steps)
    undone: list[Callable[[], Any]] = []
    try:
        for do, undo in steps:
            undone.append(undo)
            do()
    except Exception as error:
        for undo in reversed(undone):
            undo()
        raise CheckpointError(
            f"load_checkpoint: what was saved could not be taken up, and all is as it was: {error}"
        ) from error
    if random is not None:
        torch.set_rng_state(random["torch"])
        current_env().random.set_state(random["jax"])
    return result


def _match(into: Any, state: Any, where: str, steps: list[Any]) -> Any:
    """What `state` is in the shape of `into`; adds what is to be done for it, and how to undo that, to `steps`."""
    if _is_stateful(into):
        _check_state(into, state, where)
        steps.append((lambda: into.load_state_dict(state), _undo(into)))
        return into
    if isinstance(into, torch.Tensor):
        _check_tensor(into, state, where)
        steps.append((lambda: _assign(into, state), _undo_tensor(into)))
        return into
    if isinstance(into, dict) or hasattr(into, "_fields"):
        fields = into if isinstance(into, dict) else into._asdict()
        if not isinstance(state, dict):
            raise CheckpointError(
                f"load_checkpoint: {where} was saved as a {type(state).__name__}, but `into` has a dict there."
            )
        missing = [key for key in fields if key not in state]
        if missing:
            raise CheckpointError(
                f"load_checkpoint: {where} has no {', '.join(map(repr, missing))}; saved are {', '.join(map(repr, state))}."
            )
        found = {key: _match(item, state[key], f"{where}[{key!r}]", steps) for key, item in fields.items()}
        return found if isinstance(into, dict) else type(into)(**found)
    if isinstance(into, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(into):
            count = f"{len(state)} items" if isinstance(state, (list, tuple)) else f"a {type(state).__name__}"
            raise CheckpointError(
                f"load_checkpoint: {where} was saved as {count}, but `into` has {len(into)} items there."
            )
        items = [_match(i, s, f"{where}[{n}]", steps) for n, (i, s) in enumerate(zip(into, state, strict=True))]
        return type(into)(items)
    return state


def _check_tensor(into: torch.Tensor, state: Any, where: str) -> None:
    shape, dtype = getattr(state, "shape", None), getattr(state, "dtype", None)
    if isinstance(state, jax.Array):
        dtype = torch_dtype(state.dtype)
    if shape is None or tuple(shape) != tuple(into.shape) or dtype != into.dtype:
        saved = type(state).__name__ if shape is None else f"{dtype} of shape {tuple(shape)}"
        raise CheckpointError(
            f"load_checkpoint: {where} was saved as {saved}, but {into.dtype} of shape {tuple(into.shape)} is to take it up."
        )


def _check_state(into: Any, state: Any, where: str) -> None:
    """For modules and optimizers, what load_state_dict would find only half-way through."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"load_checkpoint: {where} was saved as a {type(state).__name__}, no state of a {type(into).__name__}."
        )
    if isinstance(into, torch.nn.Module):
        own = into.state_dict()
        missing, extra = sorted(set(own) - set(state)), sorted(map(str, set(state) - set(own)))
        if missing or extra:
            raise CheckpointError(
                f"load_checkpoint: {where} does not fit {type(into).__name__}. Missing: {', '.join(missing) or 'nothing'}; "
                f"not in it: {', '.join(extra) or 'nothing'}."
            )
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                _check_tensor(value, state[name], f"{where}.{name}")
    elif isinstance(into, torch.optim.Optimizer):
        counts = [len(group["params"]) for group in into.param_groups]
        saved = [len(group["params"]) for group in state.get("param_groups", [])]
        if counts != saved:
            raise CheckpointError(
                f"load_checkpoint: {where} is of an optimizer with {saved} parameters in its groups, but this "
                f"{type(into).__name__} has {counts}."
            )
        parameters = [p for group in into.param_groups for p in group["params"]]
        for number, values in state["state"].items():
            for name, value in values.items():
                if name != "step" and isinstance(value, torch.Tensor) and value.dim() and name.startswith("exp_avg"):
                    if value.shape != parameters[number].shape:
                        raise CheckpointError(
                            f"load_checkpoint: {where}: {name} of parameter {number} has shape {tuple(value.shape)}, but the "
                            f"parameter {tuple(parameters[number].shape)}."
                        )


def _assign(tensor: torch.Tensor, value: Any) -> None:
    if isinstance(value, jax.Array):
        value = wrap_array(value)
    with torch.no_grad():
        if isinstance(tensor, Tensor) and isinstance(value, Tensor):
            tensor._write(value._array())  # laid out over devices as asked for
        else:
            tensor.copy_(value)


def _undo_tensor(tensor: torch.Tensor) -> Callable[[], Any]:
    held = tensor.detach().jax() if isinstance(tensor, Tensor) else tensor.detach().clone()
    return lambda: _assign(tensor, held)


def _undo(into: Any) -> Callable[[], Any]:
    if isinstance(into, torch.nn.Module):
        parts = [_undo_tensor(value) for value in into.state_dict().values() if isinstance(value, torch.Tensor)]
        return lambda: [part() for part in parts] and None
    if isinstance(into, torch.optim.Optimizer):
        state, groups = into.state, into.param_groups
        values = {p: dict(v) for p, v in state.items()}, [dict(group) for group in groups]

        def undo() -> None:
            state.clear()
            state.update(values[0])
            groups[:] = values[1]
            into.state, into.param_groups = state, groups

        return undo
    before = copy.deepcopy(into.state_dict())
    return lambda: into.load_state_dict(before)
