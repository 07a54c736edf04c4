"""The host of the packs under strain: packs found in every way there is, many of them, loaded from several threads, from
forked processes, under a trace; changed while the program runs; and none of it paid for by those who do not use it."""

import json
import subprocess
import sys
import textwrap
import zipfile

import pytest

CORE, ATEN = "torchax-core", "torchax-ops-aten"

# a library with an op of its own that adds {value}, and its lowering
LIBRARY = """
    import torch

    @torch.library.custom_op("{name}::add_some", mutates_args=(), device_types="cpu")
    def add_some(x: torch.Tensor) -> torch.Tensor:
        return x + {value}

    add_some.register_fake(lambda x: torch.empty_like(x))
"""
FAMILY = """
    from torchax_core import OpSet

    ops = OpSet("{name}.family")

    @ops.lowering("{name}::add_some")
    def add_some(x):
        return x + {value}
"""
PACK = """
    from torchax_core import OpSet, hookimpl

    TORCHAX_PACK_API = 1
    TORCHAX_NAMESPACES = ("{name}",)

    @hookimpl
    def torchax_op_sets() -> list[OpSet]:
        from {package} import family

        return [family.ops]
"""
CALL = """
    import torch, torchax_core
    from {package} import library
    print(library.add_some(torch.ones(2, device="jax")).tolist())
    (pack,) = [pack for pack in torchax_core.default_env().packs if pack.name == "{name}"]
    print(pack.distribution)
"""


def write_package(folder, name, *, package=None, value=1, init=True):
    """The three modules above, as a package in `folder`."""
    package = package or name
    place = folder.joinpath(*package.split("."))
    place.mkdir(parents=True)
    if init:
        (place / "__init__.py").write_text("")
    for module, text in {"library": LIBRARY, "family": FAMILY, "pack": PACK}.items():
        (place / f"{module}.py").write_text(textwrap.dedent(text.format(name=name, package=package, value=value)))


# -- where packs come from ---------------------------------------------------------------------------------------------


def called(fork, *folders, name, package=None):
    done = fork(CALL.format(name=name, package=package or name), CORE, ATEN, *folders)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_package(fork, folder_of_packs):
    write_package(folder_of_packs.path, "plain")
    folder_of_packs.add_info("plain", "plain = plain.pack")
    assert called(fork, folder_of_packs, name="plain") == ["[2.0, 2.0]", "plain 1.0"]


def test_a_namespace_package_in_two_places(fork, make_folder):
    one, two = make_folder(), make_folder()
    write_package(one.path, "spread", package="firm.spread")
    write_package(two.path, "other", package="firm.other", value=2)
    one.add_info("firm-spread", "spread = firm.spread.pack")
    two.add_info("firm-other", "other = firm.other.pack")
    assert called(fork, one, two, name="spread", package="firm.spread") == ["[2.0, 2.0]", "firm-spread 1.0"]
    assert called(fork, one, two, name="other", package="firm.other") == ["[3.0, 3.0]", "firm-other 1.0"]


def test_a_package_without_init(fork, folder_of_packs):
    write_package(folder_of_packs.path, "bare", init=False)
    folder_of_packs.add_info("bare", "bare = bare.pack")
    assert called(fork, folder_of_packs, name="bare") == ["[2.0, 2.0]", "bare 1.0"]


def test_a_zip_file(fork, folder_of_packs, make_folder):
    inside = make_folder()
    write_package(inside.path, "zipped")
    inside.add_info("zipped", "zipped = zipped.pack")
    archive = folder_of_packs.path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in inside.path.rglob("*"):
            file.write(path, path.relative_to(inside.path))
    (folder_of_packs.path / "zipped.pth").write_text(f"{archive}\n")
    assert called(fork, folder_of_packs, name="zipped") == ["[2.0, 2.0]", "zipped 1.0"]


def test_an_editable_install(fork, folder_of_packs, tmp_path):
    write_package(tmp_path / "src", "edited")
    (tmp_path / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["setuptools>=77"]
            build-backend = "setuptools.build_meta"
            [project]
            name = "edited"
            version = "1.0"
            [project.entry-points."torchax.op_packs"]
            edited = "edited.pack"
            [tool.setuptools.packages.find]
            where = ["src"]
        """)
    )
    code = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(folder_of_packs.path)
    assert not (folder_of_packs.path / "edited").exists()
    assert called(fork, folder_of_packs, name="edited") == ["[2.0, 2.0]", "edited 1.0"]


# -- what is not used is not paid for ----------------------------------------------------------------------------------


def test_a_pack_that_is_not_met_is_not_imported(fork, make_folder):
    sound, newer = make_folder(), make_folder()
    sound.add_pack("lazy", PACK.format(name="lazy", package="lazy") + "\n    raise SystemExit('imported')\n")
    newer.add_pack("newer", "TORCHAX_PACK_API = 99\nraise SystemExit('imported')\n")
    code = """
        import json, sys, warnings
        warnings.simplefilter("error")
        import torch, torchax_core
        x = torch.ones(2, device="jax") + 1
        packs = {pack.name: [pack.namespaces, pack.error] for pack in torchax_core.default_env().packs}
        print(json.dumps([packs, "lazy" in sys.modules]))
    """
    packs, imported = fork.json(code, CORE, ATEN, sound)
    assert packs["lazy"] == [["lazy"], None] and not imported
    done = fork.torchax("packs --json", CORE, newer)
    assert "TORCHAX_PACK_API = 99, but this torchax-core speaks 1" in done.stdout and "SystemExit" not in done.stdout


STARTUP = """
    import json, time
    import torch, jax
    times = [time.process_time()]
    import torchax_core
    times.append(time.process_time())
    packs = torchax_core.default_env().packs
    times.append(time.process_time())
    if any(pack.name == "aten" for pack in packs):
        torch.ones(2, device="jax") + 1
    times.append(time.process_time())
    print(json.dumps([len(packs), *(after - before for before, after in zip(times, times[1:]))]))
"""


def test_hundreds_of_packs(fork, folder_of_packs):
    _, imported, asked, _ = fork.json(STARTUP, CORE)
    for number in range(300):
        name = f"pack{number}"
        folder_of_packs.add_pack(name, PACK.format(name=name, package=name) + "\n    raise SystemExit('imported')\n")
    count, imported_many, asked_many, _ = fork.json(STARTUP, CORE, folder_of_packs)
    print(f"300 packs: {imported_many - imported:+.3f} s at import, {asked_many - asked:+.3f} s when first asked for")
    assert count == 300
    assert imported_many < imported + 0.1, "importing the core looks for no pack"
    assert asked_many < asked + 0.6, "2 ms a pack at most"


def test_all_packs_of_ours_cost_next_to_nothing_unless_used(fork, wheels):
    _, imported, asked, ran = fork.json(STARTUP, CORE, ATEN)
    count, imported_all, asked_all, ran_all = fork.json(STARTUP, *wheels)
    print(
        f"{count} packs: {imported_all - imported:+.3f} s, {asked_all - asked:+.3f} s, first op {ran_all - ran:+.3f} s"
    )
    assert count == len(wheels) - 1
    assert imported_all + asked_all + ran_all < imported + asked + ran + 0.3


# -- packs whose code does more than define ----------------------------------------------------------------------------


def test_a_pack_first_met_under_a_trace(fork, folder_of_packs):
    write_package(folder_of_packs.path, "table")
    folder_of_packs.add_info("table", "table = table.pack")
    family = folder_of_packs.path / "table" / "family.py"
    text = family.read_text().replace("return x + 1", "return x + ONES[0]")
    family.write_text(text.replace("ops = ", "import jax.numpy as jnp\nONES = jnp.ones(3) + 0\nops = "))
    code = """
        import json, torch, torchax_core
        from table import library
        step = torchax_core.jit(lambda x: library.add_some(x) * 2)
        x = torch.ones(2, device="jax")
        first = step(x).tolist()
        print(json.dumps([first, library.add_some(x).tolist(), step(torch.ones(3, device="jax")).tolist()]))
    """
    assert fork.json(code, CORE, ATEN, folder_of_packs) == [[4.0, 4.0], [2.0, 2.0], [4.0, 4.0, 4.0]]


def test_a_pack_that_runs_its_own_ops_while_it_is_imported(fork, folder_of_packs):
    folder_of_packs.add_pack(
        "eager",
        """
        import torch, torchax_core
        from torchax_core import OpSet, hookimpl

        TORCHAX_PACK_API = 1
        TORCHAX_OPS = ("aten::erfinv",)

        @hookimpl
        def torchax_op_sets():
            ops = OpSet("eager")

            @ops.lowering("aten::erfinv")
            def erfinv(self):
                return self + OFFSET

            return [ops]

        OFFSET = torch.erfinv(torch.zeros(1, device="jax")).item() + 5  # by the aten pack: this one is not ready
        """,
    )
    code = """
        import json, torch, torchax_core
        from torchax_core import Config, Environment
        with Environment(Config(pack_order=("eager",))):
            print(json.dumps(torch.erfinv(torch.zeros(2, device="jax")).tolist()))
    """
    assert fork.json(code, CORE, ATEN, folder_of_packs) == [5.0, 5.0]


MISFITS = """
    import jax.numpy as jnp
    from torchax_core import OpSet, hookimpl

    TORCHAX_PACK_API = 1
    TORCHAX_NAMESPACES = ("aten",)
    ops = OpSet("behind")

    @ops.lowering("aten::digamma")
    def digamma(x):  # lacks `self`, has `x`
        return x * 0

    @ops.decomposition("aten::lerp.Scalar")
    def lerp(self, end):  # lacks `weight`
        return self * 0

    @ops.decomposition("aten::logit")
    def logit(one, two=None):  # fits: torch passes by position
        return one.erfinv()

    @ops.view("aten::transpose.int")
    def transpose(self, dim0):  # lacks `dim1`
        return self

    @ops.lowering("aten::erfinv")
    def erfinv(self):
        return jnp.full_like(self, 6)

    @hookimpl
    def torchax_op_sets():
        return [ops]
"""


def test_definitions_that_do_not_fit_the_installed_torch(fork, folder_of_packs):
    folder_of_packs.add_pack("behind", MISFITS)
    code = """
        import json, warnings
        import torch, torchax_core
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.empty(2, device="jax")
            found = [torch.erfinv(x).tolist(), torch.logit(x).tolist()]
            try:
                torch.digamma(x)
            except NotImplementedError as error:
                found.append(str(error))
            try:
                x.digamma_()
            except NotImplementedError as error:
                found.append(str(error))
        said = [str(w.message) for w in caught if issubclass(w.category, torchax_core.errors.PackWarning)]
        print(json.dumps([*found, said, torch.__version__]))
    """
    inverse, logit, error, in_place, warned, version = fork.json(code, CORE, folder_of_packs)
    assert inverse == [6.0, 6.0] and logit == [6.0, 6.0], "the rest of the pack is used"
    assert len(warned) == 3
    for op, argument in (("aten::digamma", "self"), ("aten::lerp.Scalar", "weight"), ("aten::transpose.int", "dim1")):
        (text,) = [text for text in warned if f" of {op} at {folder_of_packs.path}/behind.py:" in text]
        assert argument in text and f"torch {version}" in text and "'behind' (behind 1.0)" in text
    assert all("The pack 'behind' leaves it out: the lowering of aten::digamma" in text for text in (error, in_place))

    done = fork.torchax("packs", CORE, folder_of_packs)
    assert done.returncode == 1 and "2, 3 left out" in done.stdout and "the view of aten::transpose.int" in done.stdout
    rows = {row["op"]: row for row in json.loads(fork.torchax("ops --missing --json", CORE, folder_of_packs).stdout)}
    assert rows["aten::lerp.Scalar"]["pack"] == "behind" and "weight" in rows["aten::lerp.Scalar"]["reason"]
    done = fork.torchax("doctor", CORE, ATEN, folder_of_packs)
    assert done.returncode == 1 and "FAIL packs: RuntimeError: the lowering of aten::digamma" in done.stdout

    both = """
        import json, torch, torchax_core
        found = [torch.digamma(torch.ones(2, device="jax")).tolist()]
        try:
            with torchax_core.Environment(torchax_core.Config(strict=True)):
                torch.ones(2, device="jax") * 2
        except torchax_core.errors.PackError as error:
            found.append("aten::digamma" in str(error))
        print(json.dumps(found))
    """
    (value, raised) = fork.json(both, CORE, ATEN, folder_of_packs)
    assert value == pytest.approx([-0.5772157] * 2) and raised, (
        "the next definition runs; a strict one says so later too"
    )
    done = fork(
        "import torch, torchax_core; torch.empty(2, device='jax') * 2", CORE, folder_of_packs, TORCHAX_STRICT="1"
    )
    assert done.returncode == 1 and "PackError" in done.stderr and "SignatureError" in done.stderr


def test_an_op_that_the_installed_torch_lacks(fork, folder_of_packs):
    folder_of_packs.add_pack(
        "ahead",
        """
        from torchax_core import OpSet, hookimpl

        TORCHAX_PACK_API = 1
        TORCHAX_OPS = ("aten::erfinv", "aten::invented_tomorrow", "aten::add.Tomorrow")
        ops = OpSet("ahead")

        @ops.lowering("aten::invented_tomorrow", "aten::add.Tomorrow")
        def tomorrow(self, whatever):
            return self

        @ops.decomposition("aten::composed_tomorrow")
        def composed(self, whatever):
            return self

        @ops.view("aten::viewed_tomorrow", "nosuchnamespace::viewed")
        def viewed(self, whatever):
            return self

        ops.autocast("fp32", ["aten::invented_tomorrow", "aten::add.Tomorrow"])

        @ops.lowering("aten::erfinv")
        def erfinv(self):
            return self + 5

        @hookimpl
        def torchax_op_sets():
            return [ops]
        """,
    )
    done = fork.torchax("ops --missing --pack ahead", CORE, folder_of_packs)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "aten::add.Tomorrow",
        "aten::composed_tomorrow",
        "aten::invented_tomorrow",
        "aten::viewed_tomorrow",
        "nosuchnamespace::viewed",
    ]
    assert all("has no such op" in line and "ahead.py:" in line for line in done.stdout.splitlines())
    done = fork.torchax("packs", CORE, folder_of_packs)
    assert done.returncode == 0 and "broken" not in done.stdout
    code = """
        import torch, torchax_core
        x = torch.empty(2, device="jax")
        with torch.autocast("jax", dtype=torch.bfloat16):
            print(list(torch.erfinv(x).shape))
    """
    assert fork.json(code, CORE, folder_of_packs, TORCHAX_STRICT="1") == [2]


def test_a_pack_of_functions_and_of_composite_ops_of_its_own(fork, folder_of_packs):
    folder_of_packs.add_pack(
        "above",
        """
        import torch
        from torchax_core import OpSet, hookimpl

        TORCHAX_PACK_API = 1
        TORCHAX_FUNCTIONS = ("torch.nn.functional.softsign",)
        TORCHAX_OPS = ("above::whole",)  # composite: C++ would decompose it, and the pack would never be asked

        library = torch.library.Library("above", "DEF")
        library.define("whole(Tensor x) -> Tensor")
        library.impl("whole", lambda x: x + 1, "CompositeImplicitAutograd")
        ops = OpSet("above")

        @ops.function("torch.nn.functional.softsign")
        def softsign(input):
            return input * 10

        @ops.lowering("above::whole")
        def whole(x):
            return x * x * 3

        @hookimpl
        def torchax_op_sets():
            return [ops]
        """,
    )
    code = """
        import json, torch, torchax_core
        x = torch.full((2,), 4.0, device="jax", requires_grad=True)
        found = [torch.nn.functional.softsign(x).tolist()]
        y = torch.ops.above.whole(x)
        y.sum().backward()
        print(json.dumps([*found, y.tolist(), x.grad.tolist()]))
    """
    assert fork.json(code, CORE, ATEN, folder_of_packs) == [[40.0, 40.0], [48.0, 48.0], [24.0, 24.0]]


# -- threads, forks, changes -------------------------------------------------------------------------------------------


def test_threads_loading_at_once(fork, folder_of_packs):
    write_package(folder_of_packs.path, "slow")
    folder_of_packs.add_info("slow", "slow = slow.pack")
    family = folder_of_packs.path / "slow" / "family.py"
    family.write_text(
        "import builtins, time\nbuiltins.TIMES = getattr(builtins, 'TIMES', 0) + 1\ntime.sleep(0.2)\n"
        + family.read_text()
    )
    code = """
        import builtins, json, threading, torch, torchax_core
        from slow import library
        barrier, found = threading.Barrier(8), []

        def work(number):
            barrier.wait()
            with torchax_core.Environment() if number % 2 else torchax_core.default_env():
                x = torch.full((2,), float(number), device="jax", requires_grad=True)
                (x * x).sum().backward()
                found.append(library.add_some(x.detach()).tolist() + x.grad.tolist())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        print(json.dumps([sorted(found), builtins.TIMES]))
    """
    found, times = fork.json(code, CORE, ATEN, folder_of_packs)
    assert found == [[n + 1.0, n + 1.0, 2.0 * n, 2.0 * n] for n in range(8)]
    assert times == 1


LOADER = """
    import json, sys, warnings
    warnings.filterwarnings("ignore", message=".*fork.*")
    import torch, torchax_core
    from rows import Rows, library

    found = []
    x = library.add_some(torch.ones(1, device="jax"))  # JAX has started
    loader = torch.utils.data.DataLoader(
        Rows("{device}"), batch_size=4, num_workers=1, pin_memory={pin}, multiprocessing_context="{start}", timeout=120
    )
    try:
        for batch in loader:
            found.append([batch.device.type, (batch.to("jax") + x).sum().item()])
    except RuntimeError as error:
        found.append(["error", str(error)])
    print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("start", "device", "pin"), [("fork", "cpu", True), ("fork", "jax", False), ("spawn", "jax", False)]
)
def test_workers_of_a_data_loader(fork, folder_of_packs, start, device, pin):
    write_package(folder_of_packs.path, "loaded")
    folder_of_packs.add_info("loaded", "loaded = loaded.pack")
    (folder_of_packs.path / "rows.py").write_text(
        textwrap.dedent("""
            import torch, torchax_core
            from loaded import library

            class Rows(torch.utils.data.Dataset):
                def __init__(self, device):
                    self.device = device
                def __len__(self):
                    return 4
                def __getitem__(self, index):
                    return library.add_some(torch.full((2,), float(index), device=self.device))
        """)
    )
    done = fork(LOADER.format(start=start, device=device, pin=pin), CORE, ATEN, folder_of_packs)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    if (start, device) == ("fork", "jax"):
        assert "ForkedProcessError" in found[1] and "multiprocessing_context='spawn'" in found[1]
    else:
        assert found == [device, 2 * (1 + 2 + 3 + 4) + 8 * 2.0], done.stderr


def test_a_pack_is_asked_anew(fork, folder_of_packs):
    write_package(folder_of_packs.path, "changing")
    folder_of_packs.add_info("changing", "changing = changing.pack")
    code = """
        import importlib, json, pathlib, sys
        import torch, torchax_core
        from torchax_core.packs import host
        from changing import library
        sys.dont_write_bytecode = True
        x = torch.ones(2, device="jax")
        step = torchax_core.jit(lambda x: library.add_some(x))
        found = [library.add_some(x)[0].item(), step(x)[0].item()]

        from changing import family, pack
        importlib.reload(pack)  # by itself changes nothing, and harms nothing
        found.append(library.add_some(x)[0].item())

        file = pathlib.Path(family.__file__)
        text = file.read_text()
        for new in (text.replace("x + 1", "x + 10"), text.replace("(x)", "(y)"), text.replace("x + 1", "x + 100")):
            file.write_text(new)
            importlib.invalidate_caches()
            importlib.reload(family)
            try:
                host().reload("changing")
                found += [library.add_some(x)[0].item(), step(x)[0].item()]
            except torchax_core.errors.PackError as error:
                found.append("SignatureError" in str(error))
        try:
            host().reload("chnaging")
        except torchax_core.errors.UnknownPackError as error:
            found.append("'changing'" in str(error))
        print(json.dumps(found))
    """
    found = fork.json(code, CORE, ATEN, folder_of_packs)
    assert found == [2.0, 2.0, 2.0, 11.0, 11.0, True, 101.0, 101.0, True]


def test_a_pack_offered_at_run_time(fork, folder_of_packs):
    write_package(folder_of_packs.path, "offered")
    code = """
        import json, torch, torchax_core
        from torchax_core.packs import host
        from offered import library
        x = torch.ones(2, device="jax")
        found = []
        try:
            library.add_some(x)
        except NotImplementedError as error:
            found.append("No installed pack serves the namespace 'offered'" in str(error))
        host().offer("offered", "offered.pack")
        found.append(library.add_some(x).tolist())
        try:
            host().offer("offered", "offered.pack")
        except torchax_core.errors.PackNameError as error:
            found.append("is there already" in str(error))
        print(json.dumps(found))
    """
    assert fork.json(code, CORE, ATEN, folder_of_packs) == [True, [2.0, 2.0], True]
