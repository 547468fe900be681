"""Names of models: a file, a model or a pair of models.toml, or user/repo:quant on the Hugging Face Hub."""

import os
from pathlib import Path

from spec_local.errors import DownloadError
from spec_local.system.files import expanded, format_size

# The catalog is imported only where a name is not a file: it would double the time of importing a session.

STARTER = "starter-pair"
"""The default of --main: the starter model, and the draft model that comes with specdec."""
NO_DRAFT = "none"
"""In place of a draft model: use neither the draft model of a pair nor the main model's MTP layers."""
FOUND_DRAFT = "auto"
"""In place of a draft model: where the main model has none of these, use what is found on this machine."""
FOUND_PROJECTOR = "auto"
"""In place of a projector: use the one that is found beside the main model, if there is one."""
NO_PROJECTOR = "none"
"""In place of a projector: use none."""


def paired(main: str, draft: str | None = None) -> tuple[str, str | None]:
    """Return the names of the main and the draft model; if `main` is a pair, `draft` overrides its draft."""
    if os.path.exists(expanded(main)):  # False for text that cannot be a path, whatever Python's version
        return main, draft
    from spec_local.models import catalog

    if main not in catalog.pairs():
        return main, draft
    pair = catalog.pairs()[main]
    return pair.main, draft or pair.draft


def resolve(name: Path | str, fetch: Path | str | None = None) -> Path:
    """Return the file of a model, or of the main model of a pair.

    A file that exists takes precedence over a name; a `Path` is always a file.

    fetch: the name in the error's pull command; by default the model itself.

    Raises:
        DownloadError: a named model has not been downloaded.
        InvalidRequest: there is no such model or file.
    """
    path = expanded(name)
    if isinstance(name, Path) or os.path.exists(path):
        return path
    from spec_local.models import catalog

    name, _ = paired(name)
    if not catalog.is_known(name):
        if path.suffix == ".gguf" or path.is_absolute() or name.startswith("."):
            return path  # what reads it explains that it does not exist
        raise catalog.unknown(name)
    found = catalog.find(name)
    if not found:
        size = catalog.size(name)
        size_note = f" ({format_size(size)})" if size else ""
        raise DownloadError(
            f"the model {name}{size_note} has not been downloaded: run specdec models pull {fetch or name}"
        )
    return found


def resolve_pair(
    main: Path | str, draft: Path | str | None = None, *, drafting: bool = True
) -> tuple[Path, Path | None]:
    """Return the files of the main and the draft model, where `main` may name a pair; see `resolve`.

    drafting: False omits the draft model, and does not require its file.
    """
    fetch = None if draft else main  # missing files of a pair are pulled by the pair's name
    if isinstance(main, str):
        main, own = paired(main)
        draft = draft or own
    return resolve(main, fetch), resolve(draft, fetch) if draft and drafting else None


def is_pair(main: Path, draft: Path) -> bool:
    """Return whether these files are those of a pair of models.toml."""
    from spec_local.models import catalog

    files = ((catalog.find(pair.main), catalog.find(pair.draft)) for pair in catalog.pairs().values())
    return (main, draft) in files
