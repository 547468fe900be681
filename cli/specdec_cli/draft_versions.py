"""`specdec draft versions` and `rollback`: the versions of a head that learns from the user's answers."""

from spec_local.errors import InvalidRequest
from spec_local.models.head_versions import Data, HeadVersion, HeadVersions
from spec_local.models.names import resolve
from specdec_cli import render
from specdec_cli.options import needed_main
from specdec_cli.signatures.drafts import DraftRollbackOptions, DraftVersionsOptions

_HEADINGS = ("version", "trained", "answers", "your answers", "built-in prompts", "")


def versions(options: DraftVersionsOptions) -> None:
    found, name = _found(options)
    entries, current = found.all(), found.current()
    if not entries:
        raise InvalidRequest(_none(name))
    render.table([_HEADINGS, *(_row(found, entry, current) for entry in entries)])


def rollback(options: DraftRollbackOptions) -> None:
    found, name = _found(options)
    current = found.current()
    if not current:
        raise InvalidRequest(_none(name))
    previous = found.rollback()
    now = "the head or draft model that you give, or one that is found,"
    if previous:
        now = f"version {previous.number} of {render.date(previous.trained)}"
    render.note(f"version {current.number} is no longer used for {name}; {now} is used instead")


def _found(options: DraftVersionsOptions | DraftRollbackOptions) -> tuple[HeadVersions, str]:
    """The versions, and the name of the main model's file."""
    path = resolve(needed_main(options.main, options.main_option))
    return HeadVersions(path, render.note), path.name


def _none(name: str) -> str:
    return (
        f"no head for {name} has learned from your answers yet: specdec serve --learn trains one while idle"
    )


def _row(found: HeadVersions, entry: HeadVersion, current: HeadVersion | None) -> tuple[str, ...]:
    state = ""
    if entry.is_rolled_back:
        state = "rolled back"
    elif current and entry.number == current.number:
        state = "current"
    elif not found.path(entry).exists():
        state = "deleted"
    change = (_change(entry, data) for data in ("user", "built_in"))
    return (str(entry.number), render.date(entry.trained), f"{entry.n_answers:,}", *change, state)


def _change(entry: HeadVersion, data: Data) -> str:
    before, after = (f"{each[data]:.2f}" if data in each else "–" for each in (entry.before, entry.after))
    return f"{before} → {after}"
