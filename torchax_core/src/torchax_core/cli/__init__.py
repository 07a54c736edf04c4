"""The command `torchax`: which packs there are, who defines an op, and whether this installation is sound.

    torchax packs                       packs installed, and what is wrong with the broken ones
    torchax ops softmax                 definitions whose op's name has "softmax" in it; --missing: what nobody defines
    torchax explain aten::softmax.int   every way the op could run, the first of which is used
    torchax doctor                      versions, devices, packs, and a first op
    torchax conformance --ops softmax   PyTorch's own op samples on device "jax", compared with CPU torch
    torchax new-pack my-pack            a complete, tested op pack to start from
    torchax export m:make --out m.zip   a torch module as a file that JAX runs without torch
    torchax bench eager --quick         this installation against JAX written by hand, on this machine

Each takes `--json`. Exit codes: 0, all is well; 1, a problem was found (a broken pack, an op that nobody defines, a
failed check); 2, a name, a setting or an option is wrong. With `--json` an error is printed as JSON too. A command is a
module of this package.
"""

from __future__ import annotations

import sys
import warnings

import typer
from rich.console import Console

from torchax_core.cli.bench import bench
from torchax_core.cli.conformance import conformance
from torchax_core.cli.doctor import doctor
from torchax_core.cli.explain import explain
from torchax_core.cli.export import export
from torchax_core.cli.newpack import new_pack
from torchax_core.cli.ops import ops
from torchax_core.cli.output import PROBLEM, WRONG, print_json
from torchax_core.cli.packs import packs
from torchax_core.errors import ConfigError, OpNameError, PackNameError, PackWarning, TorchaxError, UnknownPackError

__all__ = ["app", "main"]

app = typer.Typer(
    name="torchax",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="PyTorch programs on JAX: which packs there are, who defines an op, and whether this installation is sound.",
    epilog="Exit codes: 0, all is well; 1, a problem was found; 2, a name, a setting or an option is wrong.",
)
for _command in (packs, ops, explain, doctor, new_pack, export, bench):
    app.command()(_command)
# its options are those of a command of its own, which is imported only when it is called
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    conformance
)


def main() -> None:
    """The entry point of the command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackWarning)  # broken packs are in the output
        try:
            app()
        except TorchaxError as error:
            if "--json" in sys.argv:
                print_json({"error": type(error).__name__, "message": str(error)})
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
            wrong = isinstance(error, (UnknownPackError, ConfigError, OpNameError, PackNameError))
            sys.exit(WRONG if wrong else PROBLEM)
