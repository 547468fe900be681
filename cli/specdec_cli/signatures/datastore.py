"""The options of `specdec datastore`."""

from dataclasses import dataclass

from specdec_cli import options
from specdec_cli.parameters import REQUIRED


@dataclass(frozen=True, kw_only=True)
class DatastoreShowOptions:
    """Show the contents of the datastore, by vocabulary.

    The lines "answers" are what --learn keeps, by model.

    Example:

      specdec datastore show
    """


@dataclass(frozen=True, kw_only=True)
class DatastoreAddOptions:
    """Add text files that the model will quote or edit.

    Adding a file again replaces its older version. No weights are loaded. With
    --main, the first argument is also a file, unless it can only be a model.

    Examples:

      specdec datastore add coder-7b src README.md
      specdec datastore add --main main.gguf notes.txt
    """

    arguments: list[str] = options.named_model(
        default=REQUIRED,
        metavar="[MAIN] FILES",
        help="Main model, followed by text files or folders of text files.",
        show_default=False,
    )
    main: str | None = options.needed_main_option()


@dataclass(frozen=True, kw_only=True)
class DatastoreClearOptions:
    """Delete the texts of all vocabularies, and the answers that --learn has kept.

    Asks for confirmation on a terminal. Also deletes damaged files that were set
    aside, and the data that trainings have made from these answers; running
    trainings end. Heads trained on these answers are kept and listed.

    Example:

      specdec datastore clear --yes
    """

    yes: bool = options.yes_option()
