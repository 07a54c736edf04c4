"""PyTorch's own op samples (OpInfo), run on device "jax" and compared with CPU torch.

    python -m torchax_core.testing --ops '^softmax' --dtypes float32,bfloat16 --modes forward,inplace,out,view
    python -m torchax_core.testing --ops 'linalg' --dtypes float64 --modes grad --json /tmp/linalg.json

A case is one (op, dtype, mode); it passes when all its samples do. Cases run in a process apart, so that one that
aborts or hangs costs its own result and no other. What is known to fail, and why, stands in a toml file (by default
tests/opinfo/known_failures.toml above the current folder)::

    [[failure]]
    op = "linalg.eig"            # OpInfo's full name; * and ? match
    dtype = ["complex64"]        # or "*", the default
    mode = ["grad"]              # or "*", the default
    reason = "why it fails"

Exit code: 0, all cases passed or are known to fail; 1, some failed; 2, a wrong option.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import queue
import re
import signal
import threading
import time
import tomllib
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils import _pytree as pytree

from torchax_core import testing

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["MODES", "Case", "Result", "app", "cases", "known_failures", "run_case"]

MODES = ("forward", "grad", "inplace", "out", "view", "errors")
DTYPES = "float32,int64,bool,bfloat16,complex64,float64"
_SAMPLES_SEEN = 300  # some ops have thousands of samples; those taken are spread over the first this many
_GRAD_DTYPES = (torch.float64, torch.complex128)

# Results that memory happens to hold.
_UNINITIALIZED = re.compile(r"(^|_|\.)empty|^resize_")
# Results that are right only up to a sign, phase or rotation: compared through OpInfo's own invariant if not the same.
_GAUGE = re.compile(r"^(linalg\.)?(eigh?|svd)$|_lowrank$|^linalg\.(eigh?|svd)")


@dataclasses.dataclass(frozen=True)
class Case:
    """One op in one dtype ("-" for errors) and mode; `reason` if it is known to fail."""

    op: str
    dtype: str
    mode: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.mode}"


@dataclasses.dataclass
class Result:
    """How a case went.

    status:  "passed", "failed", "timeout", "crashed", "known" (known to fail: not run), "stale" (known to fail, but
             passed), or "none" (no sample applies).
    """

    case: Case
    status: str
    samples: int = 0
    message: str = ""
    detail: str = ""
    seconds: float = 0.0


# -- which cases -------------------------------------------------------------------------------------------------------


def cases(
    ops: str = "",
    dtypes: str = DTYPES,
    modes: str = ",".join(MODES),
    known: list[dict[str, Any]] | None = None,
) -> list[Case]:
    """All cases whose op's full name matches the regular expression `ops`."""
    wanted_dtypes = [_dtype(name) for name in dtypes.split(",")]
    wanted_modes = modes.split(",")
    if unknown := set(wanted_modes) - set(MODES):
        raise ValueError(f"modes are {','.join(MODES)}, but these are not: {','.join(sorted(unknown))}")
    found = []
    for name, op in _ops().items():
        if not re.search(ops, name):
            continue
        for dtype, mode in itertools.product([*wanted_dtypes, None], wanted_modes):
            if _applies(op, dtype, mode, wanted_dtypes):
                shown = "-" if dtype is None else str(dtype).removeprefix("torch.")
                found.append(Case(name, shown, mode, _reason(known or [], name, shown, mode)))
    return found


def _applies(op: OpInfo, dtype: torch.dtype | None, mode: str, wanted: list[torch.dtype]) -> bool:
    if mode == "errors" or dtype is None:
        return mode == "errors" and dtype is None and op.error_inputs_func is not None
    if mode == "inplace" and op.inplace_variant is None or mode == "out" and not op.supports_out:
        return False
    if mode != "grad":
        return dtype in op.supported_dtypes("cpu")
    doubles = any(x in _GRAD_DTYPES for x in wanted)
    return (
        op.supports_autograd
        and (dtype.is_floating_point or dtype.is_complex)
        and (dtype in _GRAD_DTYPES or not doubles)
        and dtype in op.supported_backward_dtypes("cpu")
    )


def known_failures(file: Path | None) -> list[dict[str, Any]]:
    """The entries of the toml file; None looks for tests/opinfo/known_failures.toml here and above."""
    if file is None:
        here = Path.cwd()
        candidates = (folder / "tests/opinfo/known_failures.toml" for folder in (here, *here.parents))
        file = next((x for x in candidates if x.is_file()), None)
        if file is None:
            return []
    with open(file, "rb") as stream:
        entries = tomllib.load(stream).get("failure", [])
    for entry in entries:
        if not entry.get("op") or not entry.get("reason"):
            raise ValueError(f"{file}: every [[failure]] needs `op` and `reason`, but this one does not: {entry}")
    return entries


def _reason(known: list[dict[str, Any]], op: str, dtype: str, mode: str) -> str | None:
    def names(value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    for entry in known:
        pairs = ((op, entry["op"]), (dtype, entry.get("dtype", "*")), (mode, entry.get("mode", "*")))
        if all(any(fnmatch.fnmatchcase(x, pattern) for pattern in names(patterns)) for x, patterns in pairs):
            return entry["reason"]
    return None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.strip(), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype; say 'float32' or 'int64'")
    return dtype


_loaded: dict[str, OpInfo] = {}


def _ops() -> dict[str, OpInfo]:
    if not _loaded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
            from torch.testing._internal.common_methods_invocations import op_db
        _loaded.update((op.full_name, op) for op in op_db)
    return _loaded


# -- running one case --------------------------------------------------------------------------------------------------


class _NoSample(Exception):
    """The sample says nothing about this mode: CPU torch raises, or the result is no view."""


class _TimeUp(BaseException):
    """The case's time is over. No Exception, lest a sample that raises is thought to be meant."""


def run_case(case: Case, *, max_samples: int = 8, timeout: float = 30.0, strides: bool = False) -> Result:
    """Run one case in this process. Never raises, except for KeyboardInterrupt."""
    started = time.perf_counter()
    result = Result(case, "none")
    with warnings.catch_warnings(), _time_limit(timeout):
        warnings.simplefilter("ignore")
        at = "sampling"
        try:
            op = _ops()[case.op]
            check = _CHECKS[case.mode]
            for i, sample in enumerate(_samples(op, case, max_samples)):
                at = f"sample {i}"
                torch.manual_seed(0)
                try:
                    check(op, sample, strides)
                except _NoSample:
                    continue
                result.samples += 1
                result.status = "passed"
        except _TimeUp:
            result.status, result.message = "timeout", f"{at}: still running after {timeout:g} s"
            result.detail = traceback.format_exc()
        except Exception as error:
            first, _, rest = str(error).partition("\n")
            prefix = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            result.status, result.message = "failed", f"{at}: {prefix}{first}"
            result.detail = rest if isinstance(error, AssertionError) else traceback.format_exc()
    if case.reason is not None and result.status == "passed":
        result.status = "stale"
    elif case.reason is not None and result.status in ("failed", "timeout"):
        result.status = "known"
    result.seconds = time.perf_counter() - started
    return result


def _samples(op: OpInfo, case: Case, max_samples: int) -> list[SampleInput]:
    torch.manual_seed(0)
    if case.mode == "errors":
        return [error.sample_input for error in op.error_inputs("cpu")]
    samples = _named_samples(op, case)
    seen = list(itertools.islice(samples, _SAMPLES_SEEN))
    if len(seen) <= max_samples:
        return seen
    return [seen[i * len(seen) // max_samples] for i in range(max_samples)]


def _named_samples(op: OpInfo, case: Case) -> Iterator[SampleInput]:
    for sample in op.sample_inputs("cpu", _dtype(case.dtype), requires_grad=case.mode == "grad"):
        sample.name = op.name
        yield sample


def _call(
    fn: Callable[..., Any], sample: SampleInput, device: str, **more: Any
) -> tuple[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """`fn`'s result for a copy of the sample on `device`, and that copy (input, args, kwargs) afterwards."""
    arguments = testing.moved((sample.input, tuple(sample.args), dict(sample.kwargs)), device)
    if sample.name == "tensor_split":  # its tensor of indices must be on the CPU, whatever the device
        arguments = (arguments[0], tuple(sample.args), dict(sample.kwargs))
    if sample.name == "to":
        arguments = (arguments[0], tuple(device if x == "cpu" else x for x in arguments[1]), arguments[2])
    return fn(arguments[0], *arguments[1], **arguments[2], **more), arguments


def _reference(fn: Callable[..., Any], sample: SampleInput) -> tuple[Any, Any]:
    try:
        return _call(fn, sample, "cpu")
    except Exception as error:
        raise _NoSample from error


def _is_random(op: OpInfo, sample: SampleInput, expected: Any) -> bool:
    """Whether only the shape and dtype of the result are defined: another seed gives other values."""
    if _UNINITIALIZED.search(op.full_name):
        return True
    with _another_seed():
        again = _reference(op, sample)[0]
    return not _equal(again, expected)


def _equal(one: Any, other: Any) -> bool:
    try:
        testing.assert_same_result(one, other, rtol=0, atol=0, on="cpu")
    except AssertionError:
        return False
    return True


@contextlib.contextmanager
def _another_seed() -> Iterator[None]:
    """Random numbers are others than usual, even where OpInfo sets the seed itself."""
    real = torch.manual_seed
    with unittest.mock.patch.object(torch, "manual_seed", lambda seed: real(int(seed) + 1)):
        torch.manual_seed(0)
        yield
    torch.manual_seed(0)


def _device_of(sample: SampleInput) -> str | None:
    arguments = (sample.input, sample.args, sample.kwargs)
    return testing.DEVICE if _tensors(arguments) or "device" in sample.kwargs else None


def _check_forward(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    expected, expected_arguments = _reference(op, sample)
    values = not _is_random(op, sample, expected)
    actual, arguments = _call(op, sample, testing.DEVICE)
    _compare(op, op, sample, actual, expected, values=values, strides=strides)
    ours, theirs = _tensors(arguments), _tensors(expected_arguments)
    testing.assert_same_result(ours, theirs, values=values, on=None, what="arguments afterwards")


def _compare(
    op: OpInfo,
    fn: Callable[..., Any],
    sample: SampleInput,
    actual: Any,
    expected: Any,
    *,
    values: bool,
    strides: bool,
    what: str = "",
) -> None:
    """`actual` must be `expected`, up to what is not defined, or at least as close to the truth as CPU torch is."""
    on = _device_of(sample)
    try:
        testing.assert_same_result(actual, expected, values=values, strides=strides, on=on, what=what)
    except AssertionError:
        testing.assert_same_result(actual, expected, values=False, strides=strides, on=on, what=what)
        if _GAUGE.search(op.full_name):
            process = sample.output_process_fn_grad
            testing.assert_same_result(process(actual), process(expected), on=on, what=f"{what} invariant of")
        elif not _as_good(fn, sample, actual, expected):
            raise


_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER |= {torch.complex64: torch.complex128}


def _as_good(fn: Callable[..., Any], sample: SampleInput, actual: Any, expected: Any) -> bool:
    """Whether `actual` is at most twice as far as `expected` from what `fn` gives in double precision."""

    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
            return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)
        return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value

    wide = copy.copy(sample)
    wide.input, wide.args, wide.kwargs = pytree.tree_map(widened, (sample.input, sample.args, sample.kwargs))
    try:
        exact = _tensors(_call(fn, wide, "cpu")[0])
    except Exception:  # CPU torch does not take the sample in double precision: no reference, so the case stays failed
        return False
    ours, theirs = _tensors(actual), _tensors(expected)
    if len(exact) != len(theirs) or not any(x.dtype in _WIDER for x in theirs):
        return False
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        if other.dtype not in _WIDER or truth.shape != other.shape:
            if not torch.equal(mine.detach().cpu(), other.detach()):
                return False
            continue
        mine, other = (x.detach().cpu().to(truth.dtype) for x in (mine, other))
        finite = truth.isfinite() & other.isfinite()
        if not torch.equal(mine.isfinite() & finite, finite):
            return False
        error, allowed = (((x - truth).abs()[finite]).max().item() if finite.any() else 0.0 for x in (mine, other))
        if error > 2 * allowed:
            return False
    return True


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _check_grad(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    def gradients(*args: Any, **kwargs: Any) -> Any:
        inputs = list({id(x): x for x in _tensors((args, kwargs)) if x.requires_grad}.values())
        outputs = [x for x in _tensors(sample.output_process_fn_grad(op(*args, **kwargs))) if x.requires_grad]
        return testing.gradients_of(outputs, inputs)

    expected, _ = _reference(gradients, sample)
    with _another_seed():
        values = _equal(_reference(gradients, sample)[0], expected)
    actual, _ = _call(gradients, sample, testing.DEVICE)
    testing.assert_same_result(actual, expected, values=values, on=_device_of(sample), what="gradient")


def _check_inplace(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    if sample.broadcasts_input:
        raise _NoSample
    variant = op.inplace_variant

    def inplace(x: Any, *args: Any, **kwargs: Any) -> Any:
        result = variant(x, *args, **kwargs)
        if isinstance(x, torch.Tensor) and result is not x:
            raise AssertionError("the in-place form returned another tensor than its `self`")
        return x

    _same_or_same_error(op, inplace, sample, strides)


def _check_out(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    like, _ = _reference(op, sample)

    def call(*args: Any, **kwargs: Any) -> Any:
        outs = pytree.tree_map(lambda x: torch.zeros_like(x, device=device), like)
        result = op(*args, **kwargs, out=outs)
        for given, returned in zip(pytree.tree_leaves(outs), pytree.tree_leaves(result), strict=True):
            if given is not returned:
                raise AssertionError("the returned tensor is not the one given as `out`")
        return outs

    device = "cpu"
    expected, _ = _reference(call, sample)
    values = not _is_random(op, sample, like)
    device = testing.DEVICE
    actual, _ = _call(call, sample, testing.DEVICE)
    _compare(op, op, sample, actual, expected, values=values, strides=strides)


def _check_view(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    def views(x: Any, result: Any) -> list[int]:
        """Which parts of the result are the sample's input or views of it, on CPU."""
        return [i for i, part in enumerate(pytree.tree_leaves(result)) if _aliases(part, x)]

    if not isinstance(sample.input, torch.Tensor) or sample.input.layout != torch.strided:
        raise _NoSample
    result, arguments = _reference(op, sample)
    found = views(arguments[0], result)
    if not found:
        raise _NoSample
    values = not _is_random(op, sample, result)
    actual, _ = _call(op, sample, testing.DEVICE)
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(result)
    for i in found:
        testing.assert_same_result(ours[i], theirs[i], values=values, strides=True, what="view")

    def write_view(*args: Any, **kwargs: Any) -> Any:
        view = pytree.tree_leaves(op(*args, **kwargs))[found[0]]
        view.copy_(testing.sample(view.shape, view.dtype, seed=11))
        return view, args[0]

    def write_base(*args: Any, **kwargs: Any) -> Any:
        view = pytree.tree_leaves(op(*args, **kwargs))[found[0]]
        args[0].copy_(testing.sample(args[0].shape, args[0].dtype, seed=12))
        return view, args[0]

    if torch._debug_has_internal_overlap(theirs[found[0]]) != _TOO_HARD or not _overlaps(theirs[found[0]]):
        _same_or_same_error(op, write_view, sample, True, "after writing to the view")
    _same_or_same_error(op, write_base, sample, True, "after writing to the base")


def _check_errors(op: OpInfo, sample: SampleInput, strides: bool) -> None:
    try:
        _call(op, sample, "cpu")
    except Exception as error:
        expected = error
    else:
        raise _NoSample
    try:
        actual, _ = _call(op, sample, testing.DEVICE)
    except Exception as error:
        if not isinstance(error, type(expected)):
            raise AssertionError(
                f"raises {type(error).__name__}: {str(error)[:200]!r}, but torch "
                f"{type(expected).__name__}: {str(expected)[:200]!r}"
            ) from error
    else:
        raise AssertionError(
            f"raises nothing and gives {testing._described(actual)[:200]}, but torch raises "
            f"{type(expected).__name__}: {str(expected)[:200]!r}"
        )


def _same_or_same_error(op: OpInfo, fn: Callable[..., Any], sample: SampleInput, strides: bool, what: str = "") -> None:
    """Where CPU raises, device "jax" must raise the same."""
    try:
        expected, _ = _call(fn, sample, "cpu")
    except Exception as error:
        expected_error = error
    else:
        with _another_seed():
            values = _equal(_call(fn, sample, "cpu")[0], expected) and not _UNINITIALIZED.search(op.full_name)
        actual, _ = _call(fn, sample, testing.DEVICE)
        _compare(op, fn, sample, actual, expected, values=values, strides=strides, what=what)
        return
    try:
        _call(fn, sample, testing.DEVICE)
    except Exception as error:
        if isinstance(error, type(expected_error)):
            return
        raise
    raise AssertionError(f"raises nothing, but torch {type(expected_error).__name__}: {str(expected_error)[:200]}")


_TOO_HARD = 2  # torch cannot tell whether elements of a tensor share memory, and lets it be written to in any order


def _overlaps(view: torch.Tensor) -> bool:
    reach = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    positions = torch.arange(reach).as_strided(view.shape, view.stride())
    return positions.unique().numel() < view.numel()


def _aliases(part: Any, x: torch.Tensor) -> bool:
    if not isinstance(part, torch.Tensor) or part.layout != torch.strided or not part.numel():
        return False
    same_memory = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return same_memory and (part is x or part._is_view())  # unsafe_split shares memory, but is no view


_CHECKS: dict[str, Callable[[Any, Any, bool], None]] = {
    "forward": _check_forward,
    "grad": _check_grad,
    "inplace": _check_inplace,
    "out": _check_out,
    "view": _check_view,
    "errors": _check_errors,
}


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUp after `seconds`, once Python runs again (a C++ call is not interrupted)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- running many, in processes ----------------------------------------------------------------------------------------


class _Worker:
    """A process that runs cases one after the other; started when first needed, and again after it dies."""

    def __init__(self, timeout: float, options: dict[str, Any]) -> None:
        self.timeout, self.options = timeout, options
        self.process: multiprocessing.process.BaseProcess | None = None
        self.done = 0

    def ask(self, request: Any, timeout: float | None = None) -> Any:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
            self.pipe.recv()  # it has imported everything: the clock starts now
        self.pipe.send(request)
        if not self.pipe.poll(timeout):
            raise TimeoutError
        return self.pipe.recv()

    def run(self, case: Case) -> Result:
        started = time.perf_counter()
        try:
            result = self.ask(("run", case, self.options), self.timeout + 15)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._code()
            result = Result(case, "crashed", message=f"the process died with exit code {code}")
        except TimeoutError:
            result = Result(case, "timeout", message=f"hangs: no answer {self.timeout + 15:g} s after it was started")
        else:
            self.done += 1
            if self.done % 400:  # compiled programs pile up
                return result
        if result.status in ("crashed", "timeout"):
            result.seconds = time.perf_counter() - started
            if case.reason is not None:
                result.status = "known"
        self.stop()
        return result

    def _code(self) -> int | None:
        assert self.process is not None
        self.process.join(5)
        return self.process.exitcode

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    _ops()
    pipe.send("ready")
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            return
        if kind == "cases":
            try:
                pipe.send(cases(*rest))
            except Exception as error:
                pipe.send(error)
        else:
            case, options = rest
            pipe.send(run_case(case, **options))


def _sweep(
    todo: list[Case], first: _Worker, jobs: int, timeout: float, options: dict[str, Any], console: Console
) -> list[Result]:
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in todo:
        waiting.put(case)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("OpInfo", total=len(todo))

        def work(worker: _Worker) -> None:
            try:
                while True:
                    case = waiting.get_nowait()
                    progress.update(task, description=f"{str(case)[:50]:50}")
                    results.append(worker.run(case))
                    progress.advance(task)
                    if not console.is_terminal and len(results) % max(1, len(todo) // 20) == 0:
                        failed = sum(result.status in _FAILED for result in results)
                        console.print(f"{len(results)} of {len(todo)} cases, {failed} failed", highlight=False)
            except queue.Empty:
                pass
            finally:
                worker.stop()

        workers = [first] + [_Worker(timeout, options) for _ in range(jobs - 1)]
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    order = {case: i for i, case in enumerate(todo)}
    return sorted(results, key=lambda result: order[result.case])


# -- the command -------------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, help="Run PyTorch's own op samples on device jax and compare with CPU torch.")
_FAILED = ("failed", "timeout", "crashed")


@app.command()
def sweep(
    ops: Annotated[str, typer.Option(help="Regular expression searched for in the ops' names.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated. Gradients use the doubles among them.")] = DTYPES,
    modes: Annotated[str, typer.Option(help=f"Comma-separated, of {','.join(MODES)}.")] = ",".join(MODES[:5]),
    max_samples: Annotated[int, typer.Option(help="Samples for each (op, dtype), spread over all there are.")] = 8,
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n parts of the ops, from 1.")] = "1/1",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one case.")] = 30.0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    known: Annotated[Path | None, typer.Option(help="toml file of known failures.")] = None,
    run_known: Annotated[bool, typer.Option(help="Run what is known to fail, too, and list what passes.")] = False,
    strides: Annotated[bool, typer.Option(help="Compare strides of results that are no views, too.")] = False,
    show: Annotated[int, typer.Option(help="Failures to list.")] = 200,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Whole messages of failures.")] = False,
) -> None:
    """Run PyTorch's own op samples on device "jax" and compare with CPU torch."""
    part = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if part is None or int(part[1]) > int(part[2]):
        raise typer.BadParameter(f"say i/n with 1 <= i <= n, as 2/4, not {shard!r}", param_hint="--shard")
    options = {"max_samples": max_samples, "timeout": timeout, "strides": strides}
    worker = _Worker(timeout, options)
    try:
        todo = worker.ask(("cases", ops, dtypes, modes, known_failures(known)))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if isinstance(todo, Exception):
        raise typer.BadParameter(str(todo))
    names = list(dict.fromkeys(case.op for case in todo))[int(part[1]) - 1 :: int(part[2])]
    todo = [case for case in todo if case.op in set(names)]
    results = [Result(case, "known") for case in todo if case.reason is not None and not run_known]
    run = [case for case in todo if case.reason is None or run_known]
    results += _sweep(run, worker, max(1, jobs), timeout, options, Console(stderr=True))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    _report(results, show, verbose)
    raise typer.Exit(1 if any(result.status in _FAILED for result in results) else 0)


def _report(results: list[Result], show: int, verbose: bool) -> None:
    console = Console(highlight=False)
    failed = [result for result in results if result.status in _FAILED]
    for result in failed[:show]:
        console.print(f"{result.status.upper()} {result.case}: {result.message}", markup=False, soft_wrap=True)
        if verbose and result.detail:
            console.print(result.detail, markup=False, soft_wrap=True)
    if len(failed) > show:
        console.print(f"... and {len(failed) - show} more failures (--show {len(failed)})")
    for result in results:
        if result.status == "stale":
            console.print(f"STALE {result.case}: passes, but is known to fail: {result.case.reason}", markup=False)
    table = Table("mode", "dtype", "ops", "passed", "failed", "known", "no sample", "samples")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.case.mode, result.case.dtype), []).append(result)
    for (mode, dtype), group in [*sorted(groups.items()), (("all", ""), results)]:
        count = Counter(result.status for result in group)
        failures = sum(count[status] for status in _FAILED)
        samples = sum(result.samples for result in group)
        passed = count["passed"] + count["stale"]
        row = (len(group), passed, failures, count["known"], count["none"], samples)
        table.add_row(mode, dtype, *map(str, row), style="red" if failures else "")
    console.print(table)


if __name__ == "__main__":
    app()
