"""Every example and benchmark is a command that explains itself, and `common` measures what it says."""

import importlib
import inspect
import time

import common
import pytest
import typer
from typer.testing import CliRunner

EXAMPLES = [
    "digits_cnn",
    "gpt2_training",
    "resnet18",
    "sequence_models",
    "jax_in_torch",
    "flash_attention_override",
    "int8_linear_override",
    "sharded_gpt2",
]
BENCHMARKS = ["eager", "model", "train", "startup"]


def module_of(script):
    if script == "resnet18":
        pytest.importorskip("torchvision", reason="the example runs torchvision's resnet18")
    return importlib.import_module(script)


@pytest.mark.parametrize("script", EXAMPLES + BENCHMARKS)
def test_help_explains_every_option(script):
    module = module_of(script)
    app = typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    first_words = " ".join(inspect.getdoc(module.main).split()[:4])
    assert first_words in result.output
    for option in set(inspect.signature(module.main).parameters) - {"worker"}:
        assert f"--{option.replace('_', '-')}" in result.output


@pytest.mark.parametrize("script", EXAMPLES + BENCHMARKS)
def test_the_docstring_says_how_to_run_it(script):
    module = module_of(script)
    folder = "examples" if script in EXAMPLES else "benchmarks"
    assert f"python {folder}/{script}.py" in module.__doc__


def test_interleave_prepares_each_turn_and_compares_within_rounds():
    turns = []

    def contender(name, seconds):
        def prepare():
            turns.append(name)
            return lambda: time.sleep(seconds)

        return prepare

    timings = common.interleave(
        {"slow": contender("slow", 0.02), "fast": contender("fast", 0.002)}, rounds=3, warm_up=1
    )
    assert turns == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert timings.median("slow") >= 0.02
    assert timings.ratio("slow", "fast") > 2


def test_a_ratio_is_taken_within_each_round():
    timings = common.Timings({"ours": [2.0, 200.0, 3.0], "theirs": [1.0, 100.0, 1.0]})
    assert timings.ratio("ours", "theirs") == 2.0


def test_a_failing_process_is_reported():
    assert common.run_python(["-c", "print('noise'); print([1, 2])"]) == [1, 2]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        common.run_python(["-c", "1 / 0"])
