"""Each distribution as a user gets it: a wheel, in an environment that has nothing else of ours."""

import json
import tomllib
import zipfile


def test_wheel_holds_the_package_and_nothing_else(wheels, folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (package,) = {path.name for path in (folder / "src").iterdir() if (path / "__init__.py").exists()}
    with zipfile.ZipFile(wheels[project["name"]]) as wheel:
        files = wheel.namelist()
        metadata = wheel.read(next(file for file in files if file.endswith(".dist-info/METADATA"))).decode()
    ours = {path.relative_to(folder / "src").as_posix() for path in (folder / "src").rglob("*.py")}
    assert ours <= set(files) and f"{package}/py.typed" in files
    assert {file.partition("/")[0] for file in files if ".dist-info/" not in file} == {package}
    assert "Requires-Python: >=3.11" in metadata
    assert len(metadata.partition("\n\n")[2]) > 200, "the README is the description"


def test_the_core_alone_says_what_to_install(fork):
    code = """
        import json, warnings
        warnings.simplefilter("error")
        import torch, torchax_core
        found = {"file": torchax_core.__file__, "device": str(torch.device("jax"))}
        x = torch.empty(3, device="jax")
        for name, call in {"aten": lambda: torch.add(x, x)}.items():
            try:
                call()
            except NotImplementedError as error:
                found[name] = [type(error).__name__, str(error)]
        print(json.dumps(found))
    """
    found = fork.json(code, "torchax-core")
    assert str(fork.installed["torchax-core"]) in found["file"] and found["device"] == "jax"
    kind, message = found["aten"]
    assert kind == "OperatorNotFound" and "aten::add.Tensor" in message
    assert "pip install torchax-ops-aten" in message
    packs = fork.torchax("packs", "torchax-core")
    assert packs.returncode == 0 and "pip install torchax-ops-aten" in packs.stdout
    assert fork.torchax("doctor", "torchax-core").returncode == 1


def test_core_and_aten_run_and_are_found(fork):
    code = """
        import json, warnings
        warnings.simplefilter("error")
        import torch, torchax_core
        x = torch.arange(4.0, device="jax").requires_grad_()
        x.exp().sum().backward()
        packs = [[p.name, p.distribution, p.error] for p in torchax_core.default_env().packs]
        print(json.dumps({"packs": packs, "grad": x.grad.tolist()}))
    """
    found = fork.json(code, "torchax-core", "torchax-ops-aten")
    assert [name for name, _, _ in found["packs"]] == ["aten"] and found["packs"][0][2] is None
    assert found["packs"][0][1].startswith("torchax-ops-aten ")
    assert found["grad"][0] == 1.0


def test_each_pack_is_found_with_core_alone(fork, pack):
    done = fork.torchax("packs --json", "torchax-core", pack)
    assert done.returncode == 0, done.stdout + done.stderr
    ((name, distribution),) = fork.json(
        """
        import json, importlib.metadata
        print(json.dumps([[p.name, p.dist.name] for p in importlib.metadata.entry_points(group="torchax.op_packs")]))
        """,
        "torchax-core",
        pack,
    )
    (row,) = json.loads(done.stdout)
    assert distribution == pack and row["pack"] == name and row["distribution"].startswith(f"{pack} ")


def test_importing_the_core_imports_no_pack(fork):
    loaded = fork.json(
        """
        import json, sys, os
        before = dict(os.environ)
        import torch, torchax_core
        found = [name for name in sys.modules if name.startswith("torchax_ops")]
        print(json.dumps([found, dict(os.environ) == before]))
        """,
        "torchax-core",
        "torchax-ops-aten",
    )
    assert loaded == [[], True]
