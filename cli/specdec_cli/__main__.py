"""The `specdec` command."""

import os
import sys


def main() -> None:
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them takes 30 ms
    try:
        from specdec_cli import terminal

        terminal.protect()
        from specdec_cli.app import app

        app(prog_name="specdec")
    except KeyboardInterrupt:  # before a command has started
        sys.exit(130)


if __name__ == "__main__":
    main()
