"""The `specdec` command."""

import sys


def main() -> None:
    try:
        from specdec_cli import terminal

        terminal.protect()
        from specdec_cli.app import app

        app(prog_name="specdec")
    except KeyboardInterrupt:  # before a command has started
        sys.exit(130)


if __name__ == "__main__":
    main()
