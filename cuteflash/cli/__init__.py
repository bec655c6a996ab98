"""The command line: `cuteflash info | compile | sweep | layouts | demo | bench`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `cuteflash` command."""
    try:
        from cuteflash.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the cuteflash command needs {error.name}: pip install 'cuteflash[cli]'")
    app()
