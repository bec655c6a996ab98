"""The `cuteflash` command starts here, outside the package, whose import takes seconds.

Ctrl-C during the import ends the command as it ends any other program: by the signal, without a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the `cuteflash` command."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as in the background
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cuteflash.cli import main as run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
