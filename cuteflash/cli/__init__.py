"""The command line: `cuteflash info | compile | sweep | layouts | demo | bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from cuteflash.install import how_to_install
from cuteflash.startup import quiet_interrupts


def load() -> Callable[[], None]:
    """The command, after the imports that all its subcommands need."""
    try:
        from cuteflash.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"cuteflash: the command needs {error.name}; {how_to_install('cli')}")
    return app


def main() -> None:
    """Run the command of `sys.argv`. Ctrl-C during its imports ends it without a traceback."""
    with quiet_interrupts():
        command = load()
    command()
