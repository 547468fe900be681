"""The `specdec` command."""

from specdec_cli.app import app


def main() -> None:
    app(prog_name="specdec")


if __name__ == "__main__":
    main()
