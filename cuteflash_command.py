"""The `cuteflash` command starts here, outside the package, whose import takes seconds.

Ctrl-C during them ends the command as it ends any other program: by the signal, without a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the `cuteflash` command."""
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cuteflash.cli import load

    command = load()
    signal.signal(signal.SIGINT, on_interrupt)
    command()
