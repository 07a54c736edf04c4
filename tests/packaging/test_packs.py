"""Packs that are broken, too new, or at odds with each other: left out, reported, and nothing else is harmed."""

import json

import pytest

GOOD = """
    import jax.numpy as jnp
    from torchax_core import OpSet, hookimpl

    TORCHAX_PACK_API = 1
    TORCHAX_OPS = ("aten::erfinv",)

    ops = OpSet("{name}")

    @ops.lowering("aten::erfinv")
    def erfinv(self):
        return self + {value}

    @hookimpl
    def torchax_op_sets():
        return [ops]
"""

BROKEN = {
    "raises_on_import": ("import nosuchmodule\n", "ModuleNotFoundError: No module named 'nosuchmodule'"),
    "raises_half_way": (
        """
        from torchax_core import OpSet, hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            ops = OpSet("raises_half_way")
            @ops.lowering("aten::digamma")
            def digamma(self):
                return self * 0
            raise RuntimeError("half way through")
        """,
        "RuntimeError: half way through",
    ),
    "twice": (
        """
        from torchax_core import OpSet, hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            sets = [OpSet("twice.a"), OpSet("twice.b")]
            for ops in sets:
                @ops.lowering("aten::digamma")
                def digamma(self):
                    return self * 0
            return sets
        """,
        "aten::digamma is defined twice",
    ),
    "no_op_set": (
        """
        from torchax_core import hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            return ["aten::digamma"]
        """,
        "must return a list of OpSet",
    ),
    "unknown_hook": (
        """
        from torchax_core import hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_opsets():
            return []
        """,
        "Did you mean 'torchax_op_sets'?",
    ),
    "hook_with_wrong_argument": (
        """
        from torchax_core import hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_configure(settings):
            pass
        """,
        "settings",
    ),
    "returns_nothing": (
        """
        from torchax_core import hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            pass
        """,
        "torchax_op_sets returned None; it must return a list of OpSet",
    ),
    "returns_a_set": (
        """
        from torchax_core import OpSet, hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            return OpSet("returns_a_set")
        """,
        "OpSet('returns_a_set', 0 ops); it must return a list of OpSet",
    ),
    "no_decorator": (
        """
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        def torchax_op_sets():
            return []
        """,
        "it has no hook torchax_op_sets, for want of the decorator @hookimpl",
    ),
    "exits": (
        """
        import sys
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        sys.exit("I leave")
        """,
        "SystemExit: I leave",
    ),
    "syntax_error": ("TORCHAX_PACK_API = = 1\n", "SyntaxError: invalid syntax"),
    "not_a_tuple": ("TORCHAX_PACK_API = 1\nTORCHAX_NAMESPACES = 'aten'\n", "must be a tuple of strings, but is 'aten'"),
    "too_new": ("TORCHAX_PACK_API = 2\n", "TORCHAX_PACK_API = 2, but this torchax-core speaks 1"),
    "no_api": ("TORCHAX_NAMESPACES = ('aten',)\n", "TORCHAX_PACK_API = None"),
}


# entry points that lead nowhere: what each names, and what is said of it
ASTRAY = {
    "no_module": ("nosuch.pack", "ModuleNotFoundError: No module named 'nosuch'"),
    "no_submodule": ("no_submodule.pack", "ModuleNotFoundError: No module named 'no_submodule.pack'"),
    "no_name": ("my pack!", "its entry point names 'my pack!', which is no module. Write `no_name = "),
}
CORE, ATEN = "torchax-core", "torchax-ops-aten"


@pytest.fixture(scope="module")
def broken(make_folder):
    """All the broken packs."""
    folder = make_folder()
    for name, (code, _) in BROKEN.items():
        folder.add_pack(name, code)
    for name, (target, _) in ASTRAY.items():
        folder.add_info(name, f"{name} = {target}")
    (folder.path / "no_submodule").mkdir()
    (folder.path / "no_submodule" / "__init__.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def listed(fork, broken):
    done = fork.torchax("packs --json", CORE, ATEN, broken)
    assert done.returncode == 1, done.stderr
    assert "Warning" not in done.stderr
    return {row["pack"]: row for row in json.loads(done.stdout)}


def test_the_sound_pack_is_untouched(listed):
    assert listed["aten"]["error"] is None and listed["aten"]["definitions"] > 100


@pytest.mark.parametrize(("name", "said"), [(name, x[1]) for name, x in (BROKEN | ASTRAY).items()])
def test_a_broken_pack_is_left_out_and_says_why(listed, name, said):
    row = listed[name]
    assert row["error"] is not None and row["definitions"] == 0
    assert said in row["error"]
    assert f"{name} 1.0" in row["error"], "distribution and version"


def test_file_and_line_are_named(listed, broken):
    assert f"{broken.path}/raises_half_way.py:11" in listed["raises_half_way"]["error"].partition("\n")[0]
    assert f"{broken.path}/exits.py:5" in listed["exits"]["error"].partition("\n")[0]


def test_ops_run_all_the_same_with_one_warning_each(fork, broken):
    code = """
        import json, warnings
        import torch, torchax_core
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.ones(2, device="jax")
            values = [torch.digamma(x).tolist(), torch.digamma(x + 1).tolist(), (x * 3).tolist()]
        kinds = [str(w.message) for w in caught if issubclass(w.category, torchax_core.errors.PackWarning)]
        print(json.dumps([values, kinds]))
    """
    values, warned = fork.json(code, CORE, ATEN, broken)
    assert values[0] == pytest.approx([-0.5772157] * 2) and values[2] == [3.0, 3.0]
    assert len(warned) == len(BROKEN) + len(ASTRAY) and len(set(warned)) == len(warned)


def test_the_reason_is_in_the_error_of_an_op_it_would_have_given(fork, folder_of_packs):
    folder_of_packs.add_pack("raises_half_way", BROKEN["raises_half_way"][0])
    code = """
        import json, warnings
        warnings.simplefilter("ignore")
        import torch, torchax_core
        try:
            torch.digamma(torch.empty(2, device="jax"))
        except NotImplementedError as error:
            print(json.dumps(str(error)))
    """
    message = fork.json(code, CORE, folder_of_packs)
    assert "raises_half_way" in message and "half way through" in message


def test_strict_raises(fork, broken):
    code = "import torch, torchax_core; torch.ones(2, device='jax') + 1"
    done = fork(code, CORE, ATEN, broken, TORCHAX_STRICT="1")
    assert done.returncode == 1 and "PackError" in done.stderr and "could not be loaded" in done.stderr


def test_a_blocked_pack_is_not_even_imported(fork, broken):
    blocked = ",".join(f"-{name}" for name in BROKEN | ASTRAY)
    done = fork.torchax("packs --json", CORE, ATEN, broken, TORCHAX_PACKS=blocked)
    assert done.returncode == 0, done.stdout
    assert [row["pack"] for row in json.loads(done.stdout)] == ["aten"]


def test_two_packs_with_one_op(fork, folder_of_packs):
    folder_of_packs.add_pack("first-pack", GOOD.format(name="first_pack", value=1))
    folder_of_packs.add_pack("second-pack", GOOD.format(name="second_pack", value=2))
    code = """
        import json
        import torch, torchax_core
        from torchax_core import Config, Environment
        x = torch.empty(2, device="jax")
        found = {}
        try:
            torch.erfinv(x)
        except torchax_core.errors.DuplicateOpError as error:
            found["error"] = str(error)
        for order in (("first_pack",), ("second_pack", "first_pack")):
            with Environment(Config(pack_order=order)) as env:
                torch.erfinv(x)
                found[order[0]] = str(env.explain("aten::erfinv").source)
        with Environment(Config(blocked_packs=("first_pack",))) as env:
            found["blocked"] = str(env.explain("aten::erfinv").source)
        print(json.dumps(found))
    """
    found = fork.json(code, CORE, folder_of_packs)
    assert "'first_pack'" in found["error"] and "'second_pack'" in found["error"]
    assert "first_pack.py:" in found["error"] and "second_pack.py:" in found["error"]
    assert "Config(pack_order=('first_pack', 'second_pack'))" in found["error"]
    assert "first_pack.py" in found["first_pack"] and "second_pack.py" in found["second_pack"]
    assert "second_pack.py" in found["blocked"]


def test_two_distributions_with_one_name(fork, folder_of_packs):
    folder_of_packs.add_pack("first-pack", GOOD.format(name="first_pack", value=1), entry="mine")
    folder_of_packs.add_pack("second-pack", GOOD.format(name="second_pack", value=2), entry="mine")
    rows = json.loads(fork.torchax("packs --json", CORE, folder_of_packs).stdout)
    assert [row["definitions"] for row in rows if not row["error"]] == [1]
    assert any("both name a pack 'mine'" in (row["error"] or "") for row in rows)


def test_two_distributions_with_one_module(fork, folder_of_packs):
    folder_of_packs.add_pack("old-name", GOOD.format(name="old_name", value=1))
    folder_of_packs.add_info("new-name", "new_name = old_name")
    rows = json.loads(fork.torchax("packs --json", CORE, folder_of_packs).stdout)
    assert [row["definitions"] for row in rows if not row["error"]] == [1]
    assert any("old-name 1.0, both offer 'old_name'" in (row["error"] or "") for row in rows)
