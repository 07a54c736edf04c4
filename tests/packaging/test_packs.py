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
    "wrong_signature": (
        """
        from torchax_core import OpSet, hookimpl
        TORCHAX_PACK_API = 1
        TORCHAX_NAMESPACES = ("aten",)
        @hookimpl
        def torchax_op_sets():
            ops = OpSet("wrong_signature")
            @ops.lowering("aten::digamma")
            def digamma(x):
                return x * 0
            return [ops]
        """,
        "SignatureError",
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
        @hookimpl
        def torchax_configure(settings):
            pass
        """,
        "settings",
    ),
    "too_new": ("TORCHAX_PACK_API = 2\n", "TORCHAX_PACK_API = 2, but this torchax-core speaks 1"),
    "no_api": ("TORCHAX_NAMESPACES = ('aten',)\n", "TORCHAX_PACK_API = None"),
}


@pytest.fixture(scope="module")
def site(make_site, wheels):
    """Core, the aten pack, and all the broken packs."""
    made = make_site(wheels["torchax-core"], wheels["torchax-ops-aten"])
    for name, (code, _) in BROKEN.items():
        made.add_pack(name, code)
    return made


@pytest.fixture(scope="module")
def listed(site):
    done = site.run("torchax", "packs", "--json")
    assert done.returncode == 1, done.stderr
    assert "Warning" not in done.stderr
    return {row["pack"]: row for row in json.loads(done.stdout)}


def test_the_sound_pack_is_untouched(listed):
    assert listed["aten"]["error"] is None and listed["aten"]["definitions"] > 100


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pack_is_left_out_and_says_why(listed, name):
    row = listed[name]
    assert row["error"] is not None and row["definitions"] == 0
    assert BROKEN[name][1] in row["error"]
    assert f"{name} 1.0" in row["error"], "distribution and version"


def test_ops_run_all_the_same_with_one_warning_each(site):
    found = site.python_json("""
        import json, warnings
        import torch, torchax_core
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.ones(2, device="jax")
            values = [torch.digamma(x).tolist(), torch.digamma(x + 1).tolist(), (x * 3).tolist()]
        kinds = [str(w.message) for w in caught if issubclass(w.category, torchax_core.errors.PackWarning)]
        print(json.dumps([values, kinds]))
    """)
    values, warned = found
    assert values[0] == pytest.approx([-0.5772157] * 2) and values[2] == [3.0, 3.0]
    assert len(warned) == len(BROKEN) and len(set(warned)) == len(BROKEN)


def test_the_reason_is_in_the_error_of_an_op_it_would_have_given(make_site, wheels):
    site = make_site(wheels["torchax-core"])
    site.add_pack("raises_half_way", BROKEN["raises_half_way"][0])
    message = site.python_json("""
        import json, warnings
        warnings.simplefilter("ignore")
        import torch, torchax_core
        try:
            torch.digamma(torch.empty(2, device="jax"))
        except NotImplementedError as error:
            print(json.dumps(str(error)))
    """)
    assert "raises_half_way" in message and "half way through" in message


def test_strict_raises(site):
    done = site.run("python", "-c", "import torch, torchax_core; torch.ones(2, device='jax') + 1", TORCHAX_STRICT="1")
    assert done.returncode == 1 and "PackError" in done.stderr and "could not be loaded" in done.stderr


def test_a_blocked_pack_is_not_even_imported(site):
    blocked = ",".join(f"-{name}" for name in BROKEN)
    done = site.run("torchax", "packs", "--json", TORCHAX_PACKS=blocked)
    assert done.returncode == 0, done.stdout
    assert [row["pack"] for row in json.loads(done.stdout)] == ["aten"]


def test_two_packs_with_one_op(make_site, wheels):
    site = make_site(wheels["torchax-core"])
    site.add_pack("first-pack", GOOD.format(name="first_pack", value=1))
    site.add_pack("second-pack", GOOD.format(name="second_pack", value=2))
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
    found = site.python_json(code)
    assert "'first_pack'" in found["error"] and "'second_pack'" in found["error"]
    assert "first_pack.py:" in found["error"] and "second_pack.py:" in found["error"]
    assert "first_pack.py" in found["first_pack"] and "second_pack.py" in found["second_pack"]
    assert "second_pack.py" in found["blocked"]
    assert site.python_json(code, PYTHONHASHSEED="7") == found


def test_two_distributions_with_one_name(make_site, wheels):
    site = make_site(wheels["torchax-core"])
    site.add_pack("first-pack", GOOD.format(name="first_pack", value=1), entry="mine")
    site.add_pack("second-pack", GOOD.format(name="second_pack", value=2), entry="mine")
    rows = json.loads(site.run("torchax", "packs", "--json").stdout)
    assert [row["definitions"] for row in rows if not row["error"]] == [1]
    assert any("both name a pack 'mine'" in (row["error"] or "") for row in rows)
