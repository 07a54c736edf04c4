"""Real wheels, and fresh environments with nothing of ours in them but what a test installs.

An environment of its own costs a test several seconds, most of them for importing torch and jax. Tests that only need a
fresh *process* with certain distributions installed get it by a fork of one that has imported torch and jax and nothing
of ours (`fork`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import filelock
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(p.parent for pattern in ("torchax_*", "plugins/*") for p in ROOT.glob(f"{pattern}/pyproject.toml"))
OURS = ("torchax", "__editable__", "_torchax")


def name_of(folder: Path) -> str:
    """The distribution's name, as in its pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request) -> Path:
    """The folder of each distribution in turn."""
    return request.param


@pytest.fixture(params=[name_of(folder) for folder in FOLDERS if folder.name != "torchax_core"])
def pack(request) -> str:
    """Each distribution in turn, except the core, by name."""
    return request.param


@pytest.fixture(scope="session")
def wheels(tmp_path_factory, request) -> dict[str, Path]:
    """A wheel of every distribution, by name; built from copies, so that the source folders stay clean."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # shared by the workers of pytest-xdist: built once
    folder = folder / "wheels"
    with filelock.FileLock(f"{folder}.lock"):
        return {name_of(source): _wheel(source, folder) for source in FOLDERS}


def _wheel(source: Path, folder: Path) -> Path:
    out = folder / source.name
    if not any(out.glob("*.whl")):
        copy = folder / "source" / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source}: {done.stdout}{done.stderr}"
    (wheel,) = out.glob("*.whl")
    return wheel


@dataclasses.dataclass
class Site:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder)}))


@dataclasses.dataclass
class Folder:
    """A folder of installed distributions, as site-packages is one."""

    path: Path

    def add_pack(self, name: str, code: str, *, entry: str | None = None, version: str = "1.0") -> None:
        """Install a distribution `name` by hand: one module, and an entry point for it."""
        module = name.replace("-", "_")
        (self.path / f"{module}.py").write_text(textwrap.dedent(code))
        self.add_info(name, f"{entry or module} = {module}", version=version)

    def add_info(self, name: str, entry_point: str, *, version: str = "1.0") -> Path:
        """Only the metadata of a distribution: its name, its version and an entry point."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[torchax.op_packs]\n{entry_point}\n")
        (info / "RECORD").write_text("")
        return info


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """Make an empty folder to install packs into by hand."""
    return lambda: Folder(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def folder_of_packs(make_folder) -> Folder:
    """An empty folder to install packs into by hand."""
    return make_folder()


FORKER = """
import importlib, json, os, site, sys, traceback
import jax, jax.numpy, numpy, pluggy, rich.table, torch, typer

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(task[name], os.O_WRONLY | os.O_CREAT), number)
        os.chdir(task["folder"])
        os.environ.update(task["variables"])
        for folder in task["folders"]:
            site.addsitedir(folder)
        importlib.invalidate_caches()
        sys.argv = task["argv"]
        code = 0
        try:
            exec(compile(task["code"], "<test>", "exec"), {"__name__": "__main__"})
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclasses.dataclass
class Fork:
    """Runs code in fresh processes which see third parties' distributions, and of ours those asked for."""

    process: subprocess.Popen[str]
    installed: dict[str, Path]
    scratch: Path
    count: int = 0

    def __call__(
        self, code: str, *folders: str | Folder, argv: tuple[str, ...] = ("python",), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `code`. `folders`: names of our distributions, whose wheels are installed, and folders of others."""
        self.count += 1
        cwd = self.scratch / str(self.count)
        cwd.mkdir()
        task = {
            "code": textwrap.dedent(code),
            "argv": list(argv),
            "folder": str(cwd),
            "folders": [str(f.path if isinstance(f, Folder) else self.installed[f]) for f in folders],
            "variables": variables,
            "stdout": str(cwd / "stdout"),
            "stderr": str(cwd / "stderr"),
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline()
        assert status, "the process that forks has ended"
        out, err = (cwd / "stdout").read_text(), (cwd / "stderr").read_text()
        return subprocess.CompletedProcess([code], int(status), out, err)

    def json(self, code: str, *folders: str | Folder, **variables: str):
        """What the code prints last, read as JSON."""
        done = self(code, *folders, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def torchax(self, arguments: str, *folders: str | Folder, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command `torchax`."""
        code = "from torchax_core.cli import main; main()"
        return self(code, *folders, argv=("torchax", *arguments.split()), **variables)


@pytest.fixture(scope="session")
def fork(make_site, wheels, tmp_path_factory):
    """Run code in a fresh process: see Fork."""
    site = make_site()
    installed = {}
    for name, wheel in wheels.items():
        installed[name] = tmp_path_factory.mktemp("installed")
        with zipfile.ZipFile(wheel) as archive:  # what pip does with a pure wheel, and pip itself takes seconds
            archive.extractall(installed[name])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHAX", "PYTEST", "COV"))}
    process = subprocess.Popen(
        [str(site.python), "-c", FORKER],
        cwd=site.folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Fork(process, installed, tmp_path_factory.mktemp("forks"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="session")
def third_party(tmp_path_factory) -> Path:
    """A folder of links to everything installed here, except what is ours."""
    farm = tmp_path_factory.mktemp("third_party")
    here = Path(sysconfig.get_path("purelib"))
    for path in here.iterdir():
        if not path.name.startswith(OURS) and not path.name.startswith(tuple(module_names())):
            (farm / path.name).symlink_to(path)
    return farm


def module_names() -> set[str]:
    """The import names of all our distributions, those of the example pack too."""
    return {path.name for folder in FOLDERS for path in (folder / "src").iterdir() if path.is_dir()}


@pytest.fixture(scope="session")
def make_site(tmp_path_factory, third_party):
    """Make a fresh environment that sees third parties' distributions and none of ours."""

    def make() -> Site:
        site = Site(tmp_path_factory.mktemp("site"))
        venv.create(site.folder, with_pip=False, symlinks=True)
        (site.packages / "third_party.pth").write_text(f"{third_party}\n")
        return site

    return make
