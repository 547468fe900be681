"""Copies text to the clipboard: with a program of the desktop, or else through the terminal (OSC 52)."""

import base64
import os
import shutil
import subprocess
import sys

from spec_local.errors import InvalidRequest
from spec_local.text import bytes_of
from specdec_cli import terminal

_PROGRAMS = (  # with the variable of the desktop that each needs
    (["pbcopy"], ""),
    (["wl-copy"], "WAYLAND_DISPLAY"),
    (["xclip", "-selection", "clipboard"], "DISPLAY"),
)
_PATIENCE = 5.0  # seconds, for a desktop that does not answer


def copy(text: str) -> None:
    """Copy a text to the clipboard of the machine that shows the terminal.

    Raises:
        InvalidRequest: there is neither a program nor a terminal.
    """
    if not os.environ.get("SSH_CONNECTION"):  # a program would fill the clipboard of the other machine
        for command, variable in _PROGRAMS:
            if shutil.which(command[0]) and (not variable or os.environ.get(variable)):
                try:
                    subprocess.run(
                        command,
                        input=bytes_of(text),
                        stdout=subprocess.DEVNULL,  # some stay, to hand the text out
                        stderr=subprocess.DEVNULL,
                        timeout=_PATIENCE,
                        check=True,
                    )
                    return
                except (OSError, subprocess.SubprocessError):
                    continue
    if not sys.stdout.isatty():
        raise InvalidRequest("there is no clipboard: install wl-copy or xclip, or chat on a terminal")
    stream = terminal.raw(sys.stdout)
    stream.write(f"\x1b]52;c;{base64.b64encode(bytes_of(text)).decode()}\a")
    stream.flush()
