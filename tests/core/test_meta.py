"""The repository itself: modules import alone and quietly, documents match the code."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchax_core
from torchax_core import errors, hookspecs
from torchax_core.opset import OpSet

ROOT = Path(__file__).parents[2]
PYPROJECTS = sorted([*ROOT.glob("torchax_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
DOCUMENTS = sorted(x for p in ("*.md", "docs/*.md", "torchax_*/*.md", "plugins/*/*.md") for x in ROOT.glob(p))
SOURCES = [file.parent / "src" for file in PYPROJECTS]

# Each module in a process of its own, forked once torch, jax and the core's package are there: nothing may lean on another's
# import. Importing a module of the core imports the package first, so what that imports is then done.
IMPORT_ALONE = """
import os, sys, traceback, warnings
import jax, torch
with warnings.catch_warnings(action="error"):
    import torchax_core
warnings.simplefilter("ignore")  # jax warns of forks
failed = 0
for name in sys.argv[1:]:
    if name in sys.modules:
        continue
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("error")
            __import__(name)
        except BaseException:
            print(name, file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed |= os.waitpid(child, 0)[1]
sys.exit(1 if failed else 0)
"""


def modules():
    for source in SOURCES:
        for file in sorted(source.rglob("*.py")):
            name = ".".join(file.relative_to(source).with_suffix("").parts)
            yield name.removesuffix(".__init__")


def test_every_module_imports_alone_and_without_a_warning():
    names = list(modules())
    if importlib.util.find_spec("torchvision") is None:  # where none fits, its pack is not installed
        names = [name for name in names if not name.startswith("torchax_ops_vision")]
    assert "torchax_core.tensor" in names and "torchax_ops_aten.pack" in names
    done = subprocess.run([sys.executable, "-c", IMPORT_ALONE, *names], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_are_documented():
    for name in torchax_core.__all__:
        value = getattr(torchax_core, name)
        if callable(value):
            assert value.__doc__, f"torchax_core.{name} has no docstring"


def test_every_exception_has_a_section_with_a_fix():
    text = (ROOT / "docs/errors.md").read_text()
    sections = {name: body for heading, body in _sections(text) for name in heading.split(", ")}
    for name in errors.__all__:
        if name != "TorchaxError":
            assert name in sections, f"docs/errors.md has no section {name}"
            assert len(sections[name]) > 150
    for name in sections:
        assert hasattr(errors, name), f"docs/errors.md explains {name}, which errors.py lacks"


def test_every_setting_is_documented():
    text = (ROOT / "docs/config.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| `(.+?)` \|", text, re.MULTILINE))
    fields = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(torchax_core.Config)}
    assert rows == fields
    for name in fields:
        assert f"{name}:" in torchax_core.Config.__doc__


def test_every_decorator_and_hook_constant_is_in_packs_md():
    text = (ROOT / "docs/packs.md").read_text()
    for name in ("lowering", "table", "decomposition", "view", "function", "autocast"):
        assert hasattr(OpSet, name) and f"| `{name}` |" in text
    for name in re.findall(r"TORCHAX_\w+", hookspecs.__doc__):
        assert name in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("file", PYPROJECTS, ids=lambda path: path.parent.name)
def test_distributions_follow_one_shape(file):
    project = tomllib.loads(file.read_text())["project"]
    assert (file.parent / "README.md").is_file() and project["readme"] == "README.md"
    (package,) = {path.parent.name for path in file.parent.glob("src/*/__init__.py")}
    assert (file.parent / "src" / package / "py.typed").is_file()
    ours = [need for need in project["dependencies"] if need.startswith("torchax")]
    if package == "torchax_core":
        assert ours == [] and torchax_core.__version__ == project["version"]
    else:
        assert ours == ["torchax-core ~= 0.1.0"]
        points = project["entry-points"]["torchax.op_packs"]
        assert list(points.values()) == [f"{package}.pack"]


def test_the_core_names_no_pack_in_its_imports():
    for file in (ROOT / "torchax_core/src").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torchax_ops", file.read_text(), re.MULTILINE), file


def _sections(text):
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)
