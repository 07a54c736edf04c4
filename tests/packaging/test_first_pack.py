"""docs/first-pack.md, word by word, in a fresh environment that has nothing but our wheels and third parties'."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "first-pack.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHANGE = re.compile(r"(Add to|Make) `([^`]+)`:\n\n$")


def matches(expected, printed):
    """Whether a line of the page, `...` standing for anything, is in what was printed."""
    pattern = r"[\s\S]*?".join(r"\s+".join(map(re.escape, part.split())) for part in expected.split("..."))
    return re.search(pattern, printed) is not None


def in_shell(commands, folder, environment):
    """Run the commands of a block as a user would: what they printed, the exit code, and the folder they end in."""
    done = subprocess.run(
        ["bash", "-c", f"{commands}\ncode=$?; echo; pwd; exit $code"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed, _, ends_in = done.stdout.rstrip("\n").rpartition("\n")
    return printed + done.stderr, done.returncode, Path(ends_in)


def test_the_page(make_site, wheels, tmp_path):
    site = make_site()
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHAX", "PYTEST", "COV", "PIP"))
    }
    environment |= {
        "PATH": f"{site.folder / 'bin'}:{environment['PATH']}",
        "VIRTUAL_ENV": str(site.folder),
        "COLUMNS": "400",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": " ".join(str(wheel.parent) for wheel in wheels.values()),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say: build with the setuptools that is here
    }
    text = PAGE.read_text()
    folder, printed, code, ran = tmp_path, "", 0, 0
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        if kind == "python":
            change = CHANGE.search(text[: block.start()])
            assert change is not None, f"what is to be done with this?\n{body}"
            mode = "a" if change[1] == "Add to" else "x"
            with (folder / change[2]).open(mode) as file:
                file.write(body)
        elif kind == "sh":
            assert code == 0, f"the page does not say that this fails\n{printed}"
            printed, code, folder = in_shell(body, folder, environment)
            ran += 1
        else:
            lines = body.splitlines()
            wanted = int(lines.pop().removeprefix("exit code ")) if lines[-1].startswith("exit code") else 0
            assert code == wanted, printed
            code = 0
            for line in lines:
                assert matches(line, printed), f"{line}\nis not in\n{printed}"
    assert ran == 9 and code == 0


@pytest.mark.parametrize(
    ("expected", "printed", "does"),
    [
        ("a ... d", "a b c d", True),
        ("a d", "a  \n d", True),
        ("a ... d", "d ... a", False),
        ("1 passed in ...", "11 failed in 3s", False),
    ],
)
def test_matching_of_the_pages_lines(expected, printed, does):
    assert matches(expected, printed) is does
