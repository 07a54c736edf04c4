"""cli.py: the command `torchax`, run as a user runs it, and in process where that says as much."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import torchax_core
from torchax_core import cli, packs
from torchax_core.errors import OpNameError, PackNameError, PackWarning, UnknownPackError
from torchax_core.newpack import Names, new_pack

ROOT = Path(__file__).parents[2]
PACKS = torchax_core.default_env().packs  # found before a test puts other packs in their place


def run(*arguments, **variables):
    """The installed command, in a process of its own."""
    command = Path(sysconfig.get_path("scripts")) / "torchax"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHAX_")}
    return subprocess.run(
        [command, *arguments], env={**clean, **variables}, capture_output=True, text=True, timeout=300
    )


def invoke(*arguments):
    """The command in this process: what it printed, and its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackWarning)  # as `main` does
        result = CliRunner().invoke(cli.app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout, result.exit_code


def test_an_unknown_pack_is_named_with_a_suggestion():
    done = run("packs", TORCHAX_PACKS="atem")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: no installed pack is called 'atem'")
    assert "Did you mean 'aten'?" in done.stderr and "Traceback" not in done.stderr


def test_packs_in_a_process():
    done = run("packs", "--json", TORCHAX_PACKS="aten")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["pack"] == "aten" and row["error"] is None and row["definitions"] > 100
    assert row["distribution"].startswith("torchax-ops-aten ") and row["serves"] == ["aten", "prims"]


def test_packs_for_reading():
    text, code = invoke("packs")
    assert code == 0 and "aten" in text and "torchax-ops-aten" in text


def test_a_broken_pack_is_shown(monkeypatch, tmp_path):
    class Point:
        name, value, dist = "broken", "broken.pack", None

        def load(self):
            raise ImportError("no module named luck")

    monkeypatch.setattr(packs, "_host", packs.PackHost([Point()]))
    text, code = invoke("packs")
    assert code == 1 and "broken, left out" in text and "ImportError: no module named luck" in text
    rows, code = invoke("packs", "--json")
    assert code == 1 and json.loads(rows)[0]["error"].startswith("the pack 'broken'")
    text, code = invoke("doctor")
    assert code == 1 and "FAIL packs: RuntimeError: the pack 'broken'" in text


def test_no_pack(monkeypatch):
    monkeypatch.setattr(packs, "_host", packs.PackHost([]))
    text, code = invoke("packs")
    assert code == 0 and "pip install torchax-ops-aten" in text


def test_ops():
    text, code = invoke("ops", r"^aten::cumsum$")
    assert code == 0
    op, kind, place = text.splitlines()[0].split(maxsplit=2)
    file, _, line = place.rpartition(":")
    assert (op, kind, Path(file).name) == ("aten::cumsum", "lowering", "scans.py")
    assert "cumsum" in "".join(Path(file).read_text().splitlines()[int(line) - 1 : int(line) + 6])


def test_ops_as_json():
    rows = json.loads(invoke("ops", "cumsum", "--json", "--pack", "aten")[0])
    assert all(row["pack"] == "aten" and "cumsum" in row["op"] for row in rows)
    assert {"aten::cumsum", "aten::logcumsumexp"} <= {row["op"] for row in rows}


def test_ops_of_an_unknown_pack():
    with pytest.raises(UnknownPackError, match="Did you mean 'aten'"):
        invoke("ops", "--pack", "atn")


def test_ops_missing_are_those_that_nobody_defines():
    rows = {row["op"]: row for row in json.loads(invoke("ops", "--missing", "--json")[0])}
    assert "aten::add.Tensor" not in rows and "aten::add_.Tensor" not in rows and "aten::add.out" not in rows
    assert all(row["reason"] for row in rows.values())


def test_a_bad_pattern_is_refused():
    done = CliRunner().invoke(cli.app, ["ops", "("])
    assert done.exit_code == 2 and "no regular expression" in done.stderr


def test_explain_says_file_and_line():
    text, code = invoke("explain", "aten::cumsum")
    assert code == 0
    assert text.startswith("aten::cumsum(Tensor self, int dim") and "runs by: pack lowering" in text
    assert "scans.py:" in text


def test_explain_a_form_says_what_it_derives_from():
    (row,) = json.loads(invoke("explain", "aten::add_.Tensor", "--json")[0])
    assert row["ways"][0]["via"] == "aten::add.Tensor" and row["ways"][0]["level"] == "pack"


def test_explain_a_name_without_overload():
    rows = json.loads(invoke("explain", "aten::add", "--json")[0])
    assert {"aten::add.Tensor", "aten::add.out"} <= {row["op"] for row in rows}


@pytest.mark.parametrize("name", ["aten::cumsun", "cumsum", "torch.cumsun", "aten::add.Tensr", "foo"])
def test_explain_an_unknown_op(name):
    with pytest.raises(OpNameError, match="Did you mean|Its overloads|torch function"):
        invoke("explain", name)


def test_explain_exits_with_2_on_an_unknown_op():
    done = run("explain", "aten::cumsun")
    assert done.returncode == 2 and "'aten::cumsum'" in done.stderr


def test_doctor():
    text, code = invoke("doctor")
    assert code == 0, text
    assert "FAIL" not in text and text.rstrip().endswith("all is well")
    found = json.loads(invoke("doctor", "--json")[0])
    rows = found["checks"]
    assert all(row["ok"] for row in rows) and {"versions", "packs", "an op", "jit"} <= {row["check"] for row in rows}
    assert found["ok"] and found["report"]["versions"] == torchax_core.report().versions
    assert {"aten"} <= {pack["name"] for pack in found["report"]["packs"]}


def test_doctor_finds_unmet_requirements(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=99", "nosuchthing"])
    problems = importlib.import_module("torchax_core.cli.doctor")._unmet("torchax-core")
    assert "torchax-core needs torch>=99, but " in problems[0] and "not installed" in problems[1]


def test_doctor_looks_at_the_compilation_cache(monkeypatch, tmp_path):
    (tmp_path / "program").write_bytes(b"x" * 2**20)
    monkeypatch.setenv("TORCHAX_CACHE", str(tmp_path))
    assert f"ok   compilation cache: {tmp_path}: 1 files, 1.0 MiB" in invoke("doctor")[0]
    monkeypatch.setenv("TORCHAX_CACHE", str(tmp_path / "program"))
    text, code = invoke("doctor")
    assert code == 1 and "FAIL compilation cache: RuntimeError: TORCHAX_CACHE=" in text


# -- new-pack ----------------------------------------------------------------------------------------------------------


def contents(folder):
    """Every file of a folder that is not made by running it, by path."""
    made = re.compile(r"__pycache__|\.egg-info|\.pytest_cache|^build/|^dist/")
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in paths.items() if not made.search(name)}


def test_the_example_pack_is_what_new_pack_writes(tmp_path):
    text, code = invoke("new-pack", "example_pack", "--into", str(tmp_path))
    assert code == 0 and "python -m pytest" in text
    written = contents(tmp_path / "example_pack")
    assert written == contents(ROOT / "plugins" / "example_pack"), "run `torchax new-pack example_pack` again"
    assert {str(tmp_path / "example_pack" / name) for name in written} <= set(text.splitlines())


def test_new_pack_in_json(tmp_path):
    found = json.loads(invoke("new-pack", "My.First-Pack", "--into", str(tmp_path), "--json")[0])
    folder = Path(found["folder"])
    assert folder == tmp_path / "My.First-Pack"
    assert sorted(found["files"]) == sorted(str(folder / name) for name in contents(folder))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-first-pack"
    assert project["entry-points"]["torchax.op_packs"] == {"my_first_pack": "my_first_pack.pack"}
    assert not [text for text in contents(folder).values() if "<<" in text or "example" in text]


@pytest.mark.parametrize("name", ["2d", "-x", "my pack", "", "class", "a/b", "../a", "json", "torch", "pytest"])
def test_a_name_that_will_not_do(tmp_path, name):
    with pytest.raises(PackNameError, match="letters|is there already"):
        new_pack(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    done = run("new-pack", "demo", "--into", str(tmp_path), "--json")
    assert done.returncode == 2 and "is there already" in done.stderr
    assert json.loads(done.stdout)["error"] == "PackNameError"
    assert not list((tmp_path / "demo").iterdir())


def test_names_of_a_pack():
    assert Names.of("Wave-ops") == Names("wave-ops", "wave_ops", torchax_core.__version__)


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_eager_op(monkeypatch):
    """`torchax bench eager` measures one op, and starts no process."""
    eager = importlib.import_module("torchax_core.benchmarking.eager")
    monkeypatch.setattr(eager, "CASES", eager.CASES[:1])
    monkeypatch.setattr(eager, "measure_cpu_ops", lambda **_: {name: {"add": 1.0} for name in eager.CPU_IMPORTS})


def test_bench_for_reading(one_eager_op):
    result = CliRunner().invoke(cli.app, ["bench", "eager", "--quick"])
    assert result.exit_code == 0 and "Eager ops: ours / jax" in result.stdout and "geometric mean" in result.stdout
    assert "eager (1 of 1)" in result.stderr


def test_bench_as_json(one_eager_op):
    result = CliRunner().invoke(cli.app, ["bench", "eager", "--quick", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"] and list(found["figures"]) == ["eager"]
    assert found["figures"]["eager"]["ops"]["add"]["ratio"] > 0 and found["figures"]["eager"]["machine"]["torch"]
    assert "Eager ops: ours / jax" in result.stderr
    assert "Eager ops" in invoke("bench", "eager", "--quick")[0], "tables are on stdout again"


def test_bench_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchax_core.benchmarking.train", raising=False)
    monkeypatch.setitem(sys.modules, "optax", None)
    result = CliRunner().invoke(cli.app, ["bench", "train", "--json"])
    assert result.exit_code == 1 and "pip install optax" in result.stderr
    assert json.loads(result.stdout)["errors"] == ["train needs optax: pip install optax"]


def test_dynamo_looks_into_the_models_of_benchmarks_and_into_nothing_else_of_ours():
    from torch._dynamo.trace_rules import check_file

    package = Path(torchax_core.__file__).parent
    importlib.import_module("torchax_core.dynamo")
    assert not check_file(str(package / "benchmarking" / "models.py")).skipped
    assert check_file(str(package / "jit.py")).skipped and check_file(str(package / "compat" / "config.py")).skipped


def test_bench_of_what_there_is_not():
    result = CliRunner().invoke(cli.app, ["bench", "eagre"])
    assert result.exit_code == 2 and "eagre" in result.stderr


def test_every_benchmark_is_in_the_package_and_a_script_of_the_repository():
    for benchmark in importlib.import_module("torchax_core.cli.bench").Benchmark:
        assert importlib.util.find_spec(f"torchax_core.benchmarking.{benchmark}"), benchmark
        assert (ROOT / "benchmarks" / f"{benchmark}.py").exists(), benchmark


# -- as a whole --------------------------------------------------------------------------------------------------------


def test_colours_only_on_a_terminal():
    done = run("packs", TERM="xterm-256color")
    assert done.returncode == 0 and "aten" in done.stdout and "\x1b" not in done.stdout + done.stderr


TWICE_ON_A_TERMINAL = """
import os
from torchax_core.cli import app
app(["--help"], standalone_mode=False)
print("=" * 9)
os.environ["NO_COLOR"] = "1"
app(["--help"], standalone_mode=False)
"""


def test_colours_on_a_terminal_and_not_with_no_color():
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    arguments = [sys.executable, "-c", TWICE_ON_A_TERMINAL]
    with subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=clean | {"TERM": "xterm-256color"}
    ) as done:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other side has closed
            while chunk := os.read(ours, 65536):
                written += chunk
    os.close(ours)
    assert done.returncode == 0, written
    coloured, plain = written.decode().split("=" * 9)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert colour.search(coloured) and "doctor" in plain and not colour.search(plain)


def test_install_completion(tmp_path):
    # typer takes the shell from the processes above, of which a test run need not have one; so it is told
    done = run("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    scripts = [path for path in tmp_path.rglob("*") if path.is_file() and "_TORCHAX_COMPLETE" in path.read_text()]
    assert scripts and any(scripts[0].name in path.read_text() for path in [tmp_path / ".bashrc"])


def test_completion():
    done = run(_TORCHAX_COMPLETE="complete_bash", COMP_WORDS="torchax ", COMP_CWORD="1")
    assert {"packs", "ops", "explain", "doctor", "new-pack", "bench"} <= set(done.stdout.split())


def test_every_command_has_json_and_a_line_in_the_docstring():
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        assert "--json" in invoke(name, "--help")[0], name
        assert f"torchax {name} " in cli.__doc__, name


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ops", "^aten::sin$"], 0),
        (["explain", "aten::sin"], 0),
        (["explain", "torchax_cli_test::nobody"], 1),
        (["ops", "--bogus"], 2),
        (["explain"], 2),
        (["bench", "nothing"], 2),
        (["export", "nomodule:make", "--out", "x.zip"], 2),
        (["conformance", "--bogus"], 2),
        (["nocommand"], 2),
    ],
)
def test_exit_codes(arguments, code):
    library = torch.library.Library("torchax_cli_test", "FRAGMENT")
    library.define("nobody(Tensor x) -> Tensor")
    try:
        assert CliRunner().invoke(cli.app, arguments).exit_code == code
    finally:
        library._destroy()


def test_every_command_is_in_the_documentation():
    text = (ROOT / "docs/command-line.md").read_text()
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"| `torchax {name}" in text, name


def test_help_documents_the_exit_codes():
    text, code = invoke("--help")
    assert code == 0 and "Exit codes" in text and {"packs", "ops", "explain", "doctor"} <= set(text.split())


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "torchax_core.cli", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout
