"""conformance: which cells there are, that a cell that should fail does, and that a process that dies costs one cell."""

import importlib.metadata
import json
import re
import subprocess
import sys
import time
import types

import pytest
import torch
from typer.testing import CliRunner

import torchax_core
from torchax_core import cli, packs
from torchax_core.conformance import (
    Cell,
    Options,
    Report,
    Result,
    cells,
    checks,
    known_failures,
    ops_of,
    run_cell,
    running,
    samples,
    sweep,
)
from torchax_core.conformance import known as known_module
from torchax_core.conformance.cells import ALL_MODES, dtypes_named, modes_named
from torchax_core.conformance.page import write_page
from torchax_core.conformance.report import slowest, summary

PACKS = torchax_core.default_env().packs  # found before a test puts other packs in their place


# -- which cells -------------------------------------------------------------------------------------------------------


def test_cells_follow_the_choices():
    found = cells("^(add|erfinv|argmax)$", "float32,int64,float64", "forward,grad,inplace,error")
    assert Cell("add", "float32", "forward") in found and Cell("erfinv", "float64", "grad.first") in found
    assert Cell("add", "float32", "grad.first") not in found, "gradients are for the doubles among the dtypes"
    assert Cell("add", "int64", "grad.first") not in found and Cell("argmax", "float64", "grad.first") not in found
    assert Cell("add", "-", "error") in found
    assert {cell.op for cell in found} == {"add", "erfinv", "argmax"}
    assert Cell("add", "float32", "grad.second") in cells("^add$", "float32", "grad")


def test_dtypes_and_modes_by_name():
    assert len(dtypes_named("all")) == 12 and torch.complex128 in dtypes_named("all")
    assert dtypes_named("uint16,all,uint16")[:2] == [torch.uint16, torch.bool]
    assert modes_named("out,grad") == ["out", "grad.first", "grad.second", "grad.forward"]
    with pytest.raises(ValueError, match="float31"):
        dtypes_named("float31")
    with pytest.raises(ValueError, match="sideways"):
        modes_named("forward,sideways")
    with pytest.raises(ValueError, match="--ops"):
        cells("(", "float32", "forward")


def test_shards_are_a_partition():
    whole = cells("^(add|sub|mul|div|exp)", "float32", "forward")
    parts = [cells("^(add|sub|mul|div|exp)", "float32", "forward", None, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(map(str, whole)) == sorted(str(cell) for part in parts for cell in part)
    assert all(part and len(part) < len(whole) for part in parts)
    with pytest.raises(ValueError, match="i/n"):
        cells("", "float32", "forward", None, "3/2")


def test_ops_of_a_pack(monkeypatch):
    aten, everything = ops_of("aten"), ops_of(None)
    assert "add" in aten and "nn.functional.gelu" in aten and len(aten) < len(everything)
    with pytest.raises(ValueError, match="no pack 'nobodys'"):
        ops_of("nobodys")

    own = types.ModuleType("conformance_pack")
    own.TORCHAX_PACK_API, own.TORCHAX_NAMESPACES = 1, ("conformance_lib",)
    own.TORCHAX_OPINFO = "conformance_pack:my_ops"
    own.my_ops = lambda: [everything["exp"]]
    own.torchax_op_sets = torchax_core.hookimpl(lambda: [torchax_core.OpSet("conformance_pack")])
    own.torchax_op_sets.__name__ = "torchax_op_sets"
    monkeypatch.setitem(sys.modules, "conformance_pack", own)
    point = importlib.metadata.EntryPoint("conformance", "conformance_pack", packs.GROUP)
    monkeypatch.setattr(packs, "_host", packs.PackHost([point]))
    assert list(ops_of("conformance")) == ["exp"]
    assert cells("", "float32", "forward", "conformance") == [Cell("exp", "float32", "forward")]
    assert run_cell(Cell("exp", "float32", "forward"), max_samples=1, pack="conformance").samples == 1


# -- which samples -----------------------------------------------------------------------------------------------------


def names_of(op, dtype, mode="forward", most=4):
    return [x.name for x in samples.samples_of(ops_of(None)[op], Cell(op, dtype, mode), most)]


def test_samples_come_in_the_layouts_that_opinfo_leaves_out():
    names = {name.partition(", ")[2] for name in names_of("mul", "complex64")}
    assert names == {"", "non-contiguous", "conj bit", "neg bit", "requires grad"}
    assert any("channels last" in name for name in names_of("nn.functional.max_pool2d", "float32"))
    assert not any(", " in name for name in names_of("mul", "complex64", most=1))
    found = {
        x.name.partition(", ")[2]: x.input.input
        for x in samples.samples_of(ops_of(None)["mul"], Cell("mul", "complex64", "forward"), 4)
    }
    assert found["conj bit"].is_conj() and found["neg bit"].is_neg() and found["requires grad"].requires_grad
    assert not found["non-contiguous"].is_contiguous()


def test_samples_hold_a_scalar_and_an_empty_one():
    inputs = [x.input.input for x in samples.samples_of(ops_of(None)["cumsum"], Cell("cumsum", "float32", "view"), 3)]
    assert any(x.dim() == 0 for x in inputs)
    assert any(
        x.numel() == 0
        for x in (s.input.input for s in samples.samples_of(ops_of(None)["norm"], Cell("norm", "float32", "view"), 4))
    ) == any(x.input.numel() == 0 for x in ops_of(None)["norm"].sample_inputs("cpu", torch.float32))


# -- what is right and what is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_right_op_passes(mode):
    op = {"view": "transpose", "error": "dot"}.get(mode, "mul")
    result = run_cell(Cell(op, "-" if mode == "error" else "float64", mode), max_samples=2)
    assert (result.status, result.message) == ("passed", "")
    assert result.samples > 0 and result.seconds > 0


def test_random_ops_are_compared_by_shape():
    assert run_cell(Cell("nn.functional.dropout", "float32", "forward"), max_samples=2).status == "passed"


def test_results_that_are_right_up_to_a_sign_pass():
    assert run_cell(Cell("linalg.svd", "float32", "forward"), max_samples=2).status == "passed"


class Wrong:
    """An op of OpInfo's, wrong on the device as `how` says."""

    def __init__(self, op, how):
        self.op, self.how = op, how

    def __getattr__(self, name):
        return getattr(self.op, name)

    def on_jax(self, x):
        return x.device.type == "jax"

    def __call__(self, x, *args, out=None, **kwargs):
        if not self.on_jax(x):
            return self.op(x, *args, out=out, **kwargs) if out is not None else self.op(x, *args, **kwargs)
        return self.how(self.op, x, *args, **(kwargs if out is None else kwargs | {"out": out}))

    @property
    def inplace_variant(self):
        return lambda x: self.how(self.op, x) if self.on_jax(x) else x.exp_()


def reads_only_its_input(op, x, *args, out=None, **kwargs):
    return op(x.contiguous(), *args, **kwargs)


WRONG = {
    "values": ("exp", "forward", lambda op, x: (x * 1.001).exp(), "sample 0: result: values differ"),
    "dtype": ("exp", "forward", lambda op, x: x.exp().float(), "sample 0: result: dtype is torch.float32"),
    "format": (
        "nn.functional.max_pool2d",
        "forward",
        reads_only_its_input,
        "which is not channels_last as torch's",
    ),
    "argument": (
        "exp",
        "forward",
        lambda op, x: x.copy_(x.exp()).clone(),
        "arguments afterwards: result: values differ",
    ),
    "requires grad": (
        "exp",
        "forward",
        lambda op, x: x.detach().exp(),
        "requires grad: result: requires_grad is False",
    ),
    "inplace": ("exp", "inplace", lambda op, x: x.exp(), "sample 0: the in-place form returned another tensor"),
    "inplace values": ("exp", "inplace", lambda op, x: x.mul_(2), "sample 0: result: values differ"),
    "out": ("exp", "out", lambda op, x, out: x.exp(), "sample 0: the returned tensor is not the one given"),
    "out size": (
        "exp",
        "out",
        lambda op, x, out: op(x, out=out) if out.numel() == x.numel() else out,
        "sample 0: out= of size 0: result: shape is (0,)",
    ),
    "out warning": (
        "exp",
        "out",
        lambda op, x, out: op(x, out=out if out.numel() <= x.numel() else out.resize_(x.shape)),
        "sample 0: out= of another size: resizes without torch's warning",
    ),
    "out strides": (
        "exp",
        "out",
        lambda op, x, out: op(x, out=out if out.is_contiguous() else out.resize_(0).resize_(x.shape)),
        "sample 0: `out` had the right shape (20,), but its stride (2,) is now (1,)",
    ),
    "out dtype": (
        "exp",
        "out",
        lambda op, x, out: out.copy_(x.exp()) if out.dtype == torch.int64 else op(x, out=out),
        "sample 0: out= int64: raises nothing",
    ),
    "gradient": ("exp", "grad.first", lambda op, x: x.detach() * x, "sample 0: gradient: result: values differ"),
    "second": (
        "exp",
        "grad.second",
        lambda op, x: x * x.detach().exp(),
        "sample 0: second gradient: result 0: values differ",
    ),
    "tangent": ("exp", "grad.forward", lambda op, x: x * 2, "sample 0: tangent: result: values differ"),
    "view": ("t", "view", lambda op, x: op(x).clone(), "sample 0: after writing to the"),
    "vmap": (
        "exp",
        "vmap",
        lambda op, x: op(x) if not torch._C._functorch.is_batchedtensor(x) else op(x) * 2,
        "vmap: result",
    ),
    "error": ("dot", "error", lambda op, x, *args: x, "error input 0: raises nothing"),
    "error type": (
        "dot",
        "error",
        lambda op, x, *args: [].pop(),
        "error input 0: raises IndexError",
    ),
    "error message": (
        "dot",
        "error",
        lambda op, x, *args: x.reshape(7, 7, 7),
        "error input 0: says",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_op_fails(monkeypatch, name):
    op, mode, how, says = WRONG[name]
    ops = dict(ops_of(None))
    ops[op] = Wrong(ops[op], how)
    monkeypatch.setattr(running, "ops_of", lambda pack: ops)
    result = run_cell(Cell(op, "-" if mode == "error" else "float64", mode), max_samples=2)
    assert result.status == "failed"
    assert says in result.message, result.message
    assert result.sample.startswith("float"), "the failing sample's arguments"


def test_a_failure_names_the_definitions_that_ran(monkeypatch):
    ops = dict(ops_of(None), exp=Wrong(ops_of(None)["exp"], lambda op, x: x.cosh()))
    monkeypatch.setattr(running, "ops_of", lambda pack: ops)
    result = run_cell(Cell("exp", "float32", "forward"), max_samples=1)
    assert any(line.startswith("aten::cosh  pack") and ".py:" in line for line in result.definitions), (
        result.definitions
    )


def test_a_result_further_from_the_truth_than_torch_fails_and_a_nearer_one_passes(monkeypatch):
    def exact(op, x):
        return x.double().exp().to(x.dtype)

    def rounded(op, x):
        return x.exp().bfloat16().to(x.dtype)

    for how, status in ((exact, "passed"), (rounded, "failed")):
        ops = dict(ops_of(None), exp=Wrong(ops_of(None)["exp"], how))
        monkeypatch.setattr(running, "ops_of", lambda pack, ops=ops: ops)
        assert run_cell(Cell("exp", "float32", "forward"), max_samples=1).status == status


def test_a_nearer_result_passes_in_out_of_another_dtype_too(monkeypatch):
    """CPU torch takes `log` of a rounded quotient: where that is near 1, little is right of what it writes to `out`."""

    def exact(op, x, eps=None, out=None):
        wide = op(x.double(), eps)
        return wide.to(x.dtype) if out is None else out.copy_(wide.to(x.dtype))

    def off(op, x, eps=None, out=None):
        result = exact(op, x, eps) + 0.2
        return result if out is None else out.copy_(result)

    monkeypatch.setattr("torchax_core.conformance.checks._OUTS", {checks._WIDER: checks._OUTS[checks._WIDER]})
    for how, status in ((exact, "passed"), (off, "failed")):
        ops = dict(ops_of(None), logit=Wrong(ops_of(None)["logit"], how))
        monkeypatch.setattr(running, "ops_of", lambda pack, ops=ops: ops)
        assert run_cell(Cell("logit", "bfloat16", "out"), max_samples=1).status == status


def test_time_over(monkeypatch):
    ops = dict(ops_of(None), exp=Wrong(ops_of(None)["exp"], lambda op, x: time.sleep(60)))
    monkeypatch.setattr(running, "ops_of", lambda pack: ops)
    result = run_cell(Cell("exp", "float32", "forward"), timeout=0.5)
    assert result.status == "timeout" and "still running after 0.5 s" in result.message


# -- known failures ----------------------------------------------------------------------------------------------------


def entries(tmp_path, text):
    file = tmp_path / "known.toml"
    file.write_text(text)
    return known_failures(file)


def test_known_failures_cover_cells(tmp_path):
    known = entries(tmp_path, '[[failure]]\nop = "ad*"\ndtype = ["float32"]\nmode = "grad"\nreason = "because"\n')
    assert known_module.reason(known, Cell("add", "float32", "grad.second")) == "because"
    for other in (
        Cell("sub", "float32", "grad.first"),
        Cell("add", "float64", "grad.first"),
        Cell("add", "float32", "out"),
    ):
        assert known_module.reason(known, other) is None


def test_known_failures_of_another_torch(tmp_path):
    for versions, count in (("<1.0", 0), (">=2.0", 1)):
        text = f'[[failure]]\nop = "add"\ntorch = "{versions}"\nreason = "because"\n'
        assert len(entries(tmp_path, text)) == count


def test_a_wrong_known_failure_is_refused(tmp_path):
    for text, says in (
        ('op = "add"', "needs `op` and `reason`"),
        ('op = "add"\nreason = "x"\nmood = "out"', "mood"),
        ('op = "add"\nreason = "x"\ntorch = "new"', "version specifier"),
    ):
        with pytest.raises(ValueError, match=says):
            entries(tmp_path, f"[[failure]]\n{text}\n")


def test_a_known_failure_that_passes_is_found(tmp_path):
    known = entries(tmp_path, '[[failure]]\nop = ["add", "sub"]\nreason = "once"\n')
    passed = Result(Cell("add", "float32", "out"), "passed")
    failed = Result(Cell("sub", "float32", "out"), "failed")
    ((entry, cells_passed, whole),) = known_module.fixed(known, [passed, failed])
    assert entry.reason == "once" and cells_passed == [passed.cell] and not whole
    assert known_module.fixed(known, [passed])[0][2]
    assert not known_module.fixed(known, [failed])


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path):
    known = entries(tmp_path, '[[failure]]\nop = "sub"\nreason = "because"\n')
    results = [
        Result(
            Cell("add", "float32", "forward"), "passed", 4, 0.5, compiles=3, compile_seconds=0.2, longest_compile=0.1
        ),
        Result(
            Cell("sub", "float32", "forward"), "failed", 1, 0.1, "sample 1: </script>", "more", "float32[3]", ["x.py:3"]
        ),
        Result(Cell("mul", "int64", "forward"), "crashed", 0, 2.0, "the process died"),
        Result(Cell("mul", "int64", "out"), "none"),
    ]
    return Report(
        {"ops": "", "max_samples": 4}, known, {x.cell: x for x in results}, code="abc", seconds=3.0, finished=True
    )


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    report.save(tmp_path / "new" / "report.json")
    again = Report.load(tmp_path / "new" / "report.json", report.known)
    assert again == report
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["report.json"]
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="no report"):
        Report.load(tmp_path / "other.json", [])


def test_failures_leave_out_the_known(report):
    assert [str(x.cell) for x in report.failures()] == ["mul int64 forward"]


def test_summary_counts_before_and_after_known_failures(report):
    lines = {tuple(line.split()[:2]): line.split()[2:] for line in summary(report)[1:]}
    assert lines["forward", "float32"] == ["2", "1", "0", "1", "1", "0", "50.00", "100.00"]
    assert lines["forward", "all"] == ["3", "1", "0", "2", "1", "1", "33.33", "66.67"]
    assert lines["out", "int64"] == ["1", "0", "1", "0", "0", "0", "-", "-"]
    assert lines["all", "all"][0] == "4"


def test_summary_has_dtypes_in_their_order(report):
    for dtype in ("bool", "complex128", "float16"):
        cell = Cell("add", dtype, "forward")
        report.results[cell] = Result(cell, "passed")
    rows = [line.split()[1] for line in summary(report)[1:] if line.startswith("forward")]
    assert rows == ["bool", "int64", "float16", "float32", "complex128", "all"]


def test_slowest(report):
    lines = slowest(list(report.results.values()))
    assert lines[0] == "slowest cells" and lines[2].startswith("mul") and "2.00" in lines[2]
    assert lines[lines.index("slowest compiles") + 1].startswith("add")


def test_page_is_whole(report, tmp_path):
    file = tmp_path / "page.html"
    write_page(report, file)
    text = file.read_text()
    assert "http" not in text and "src=" not in text
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert [cell[3] for cell in data["cells"]] == ["passed", "known", "crashed", "none"]
    assert data["details"]["1"]["message"] == "sample 1: </script>" and data["details"]["1"]["definitions"] == [
        "x.py:3"
    ]


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_crash_and_a_hang_cost_one_cell_each(tmp_path, monkeypatch):
    (tmp_path / "deadly_pack.py").write_text(DEADLY)
    (tmp_path / "deadly_pack-1.dist-info").mkdir()
    (tmp_path / "deadly_pack-1.dist-info" / "METADATA").write_text("Name: deadly-pack\nVersion: 1\n")
    (tmp_path / "deadly_pack-1.dist-info" / "entry_points.txt").write_text("[torchax.op_packs]\ndeadly = deadly_pack\n")
    monkeypatch.syspath_prepend(tmp_path)  # a spawned process gets this one's path
    monkeypatch.setattr("torchax_core.conformance.workers._GRACE", 1.0)
    todo = [Cell(op, "float32", "forward") for op in ("abort", "exp", "hang", "neg")]
    found = {r.cell.op: r for r in sweep(todo, Options(max_samples=1, timeout=8.0, pack="deadly"), workers=1)}
    assert {op: r.status for op, r in found.items()} == {
        "abort": "crashed",
        "exp": "passed",
        "hang": "timeout",
        "neg": "passed",
    }
    assert "exit code" in found["abort"].message
    assert found["abort"].definitions, "the ops it is probably about"


DEADLY = """
import os, signal, time
import torch
from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("deadly_lib",)


@hookimpl
def torchax_op_sets():
    return [OpSet("deadly_pack")]


def TORCHAX_OPINFO():
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

    def samples(op, device, dtype, requires_grad, **kwargs):
        yield SampleInput(torch.ones(3, dtype=dtype, device=device))

    def abort(x):
        if x.device.type == "jax":
            os.abort()
        return x

    def hang(x):
        if x.device.type == "jax":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as C++ code that does not return
            time.sleep(60)
        return x

    own = [OpInfo(n, op=f, aten_name="exp", dtypes={torch.float32}, sample_inputs_func=samples, supports_out=False)
           for n, f in (("abort", abort), ("hang", hang))]
    return own + [op for op in op_db if op.full_name in ("exp", "neg")]
"""


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, ["conformance", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_command(tmp_path, monkeypatch):
    """The command, its report and its page; then resumed: nothing is run again."""
    monkeypatch.setattr("torchax_core.conformance.command.fingerprint", lambda: "the same code")
    file, page = tmp_path / "report.json", tmp_path / "page.html"
    command = ["--ops", "^exp$", "--dtypes", "float32", "--mode", "forward,out", "--max-samples", "1", "--quick"]
    done = invoke(*command, "--json", str(file), "--html", str(page), "--time")
    assert done.exit_code == 0, done.output
    assert "slowest compiles" in done.stdout and '"exp"' in page.read_text()
    saved = json.loads(file.read_text())
    assert saved["finished"] and {c["mode"] for c in saved["cells"] if c["status"] == "passed"} == {"forward", "out"}

    saved["finished"], saved["cells"] = False, saved["cells"][:1]
    saved["cells"][0]["message"] = "taken over"
    file.write_text(json.dumps(saved))
    again = invoke(*command, "--json", str(file))
    assert again.exit_code == 0 and "going on from" in again.stderr and "1 of 1 cells" in again.stderr
    assert [c.get("message") for c in json.loads(file.read_text())["cells"]] == ["taken over", None]


def test_a_wrong_option_is_said(tmp_path):
    (tmp_path / "known.toml").write_text('[[failure]]\nop = "add"\n')
    done = invoke("--ops", "^exp$", "--known", str(tmp_path / "known.toml"))
    assert done.exit_code == 2 and "needs `op` and `reason`" in re.sub(r"[\s│]+", " ", done.stderr)


def test_the_module_is_the_command_too(tmp_path):
    """`python -m torchax_core.testing`, with the older spelling of its options."""
    command = [sys.executable, "-m", "torchax_core.testing", "--ops", "^exp$", "--dtypes", "float32", "--quick"]
    command += ["--modes", "forward", "--max-samples", "1", "--jobs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "forward  float32" in done.stdout, done.stdout + done.stderr


def test_mode_compile_compiles_the_forward_and_the_backward(monkeypatch):
    from torchax_core import whole

    cell = Cell("fft.rfft", "float64", "compile")
    assert run_cell(cell, max_samples=1).status == "passed"
    monkeypatch.setattr(whole, "conjugate", lambda x: x)  # of compiled graphs alone
    result = run_cell(cell, max_samples=1)
    assert result.status == "failed" and "gradient" in result.message
