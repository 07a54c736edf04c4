"""plugins/example_pack as its copier meets it: installed from its folder, found by its entry point, its tests run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "plugins" / "example_pack"


def call(*command, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *command], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def test_its_own_tests(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site = tmp_path / "site"
    call("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(tmp_path / "source"))
    tests = str(tmp_path / "source" / "tests")
    out = call("pytest", "-q", "-p", "no:cacheprovider", "-W", "error:::example_pack", tests, PYTHONPATH=str(site))
    assert "passed" in out
