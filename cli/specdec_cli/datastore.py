"""`specdec datastore`: show, add and delete what `--datastore` and `--learn` keep."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path

from spec_local.datastore import copies, datastore, text_files
from spec_local.datastore.answer_store import AnswerContents, answer_stores
from spec_local.datastore.copies import Made
from spec_local.datastore.datastore import Contents
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.headers import open_header
from spec_local.models import head_versions
from spec_local.models.names import resolve
from spec_local.system.files import expanded, format_size
from spec_local.text import counted
from specdec_cli import progress, render
from specdec_cli.signatures.stores import DatastoreAddOptions, DatastoreClearOptions, DatastoreShowOptions

_MAX_NAMES = 3  # of skipped files in one line
_count = functools.partial(counted, separator=",")


def show(options: DatastoreShowOptions) -> None:
    folders = datastore.folders()
    if not folders:
        render.note("the datastore is empty: use --datastore, or add files with specdec datastore add")
    described = []
    for folder in folders:
        described.append(
            _described(datastore.contents(folder), _answers(folder), datastore.set_aside(folder))
        )
    render.write("\n".join(described))


def add(options: DatastoreAddOptions) -> None:
    main, arguments = options.main, options.arguments
    first, *rest = arguments
    if not main or _is_model(first):
        main, arguments = first, rest
    if not arguments:
        raise InvalidRequest("the text files are missing: give the model, and then files or folders")
    files = text_files.list_files([expanded(path) for path in arguments])
    model = open_header(resolve(main))
    with progress.bar("reading", len(files)) as advance:
        found = text_files.tokenize_files(files, model.vocabulary, datastore.MAX_TOKENS, lambda: advance(1))
    for reason, skipped in found.skipped.items():
        more = f" and {len(skipped) - _MAX_NAMES} more" if len(skipped) > _MAX_NAMES else ""
        render.note(f"skipped, {reason}: {', '.join(map(str, skipped[:_MAX_NAMES]))}{more}")
    if not found.texts:
        raise InvalidRequest("none of these files can be added: give UTF-8 text files")
    opened = datastore.open_datastore(model, render.note)
    opened.add(found.texts)
    n_tokens = sum(len(text.tokens) for text in found.texts)
    render.note(
        f"added {_count(len(found.texts), 'file')} ({_count(n_tokens, 'token')}); the datastore holds "
        f"{opened.contents().n_tokens:,} of at most {datastore.MAX_TOKENS:,} tokens"
    )


def clear(options: DatastoreClearOptions) -> None:
    folders = datastore.folders()
    if not folders:
        render.note("the datastore is empty")
        return
    found = [datastore.contents(folder) for folder in folders]
    answers = [each for folder in folders for each in _answers(folder)]
    set_aside = [path for folder in folders for path in datastore.set_aside(folder)]
    sizes = [each.size for each in found] + [each.size for each in answers]
    size = sum(sizes) + sum(path.stat().st_size for path in set_aside)
    what = [_count(sum(each.n_texts for each in found), "text")]
    if answers:
        what.append(f"{_count(sum(each.n_answers for each in answers), 'answer')} kept for learning")
    if set_aside:
        what.append(_count(len(set_aside), "damaged file"))
    text = f"{' and '.join(what)} ({format_size(size)})"
    if render.confirmed_deletion(text, options.yes):
        made = [datastore.clear(folder) for folder in folders]
        render.note(f"deleted {text}")
        _say_what_was_made(made, [each.path.stem for each in answers])


def _say_what_was_made(made: Sequence[Made], keys: Sequence[str]) -> None:
    """What became of all that was made from answers that are deleted. keys: of their main models.

    Raises:
        SpecLocalError: some of it could not be deleted.
    """
    folders = [head_versions.folder_of(key) for key in keys]
    # Also those of idle training that are not listed, as the list is in a cache, which may be emptied.
    unlisted = [
        own for folder in folders for own in folder.glob(f"training/*/{copies.OWN}") if copies.delete(own)
    ]
    for path in [*(path for each in made for path in each.deleted), *unlisted]:
        render.note(f"deleted what a training had made of these answers: {path}")
    for path in (path for each in made for path in each.missing):
        render.note(f"a training kept copies of these answers in {path}: if you have moved it, delete it")
    for path in (path for each in made for path in each.heads):
        render.note(f"a head trained on these answers is kept: to remove it, delete the file {path}")
    for folder in folders:
        if any(folder.glob("*.gguf")):
            render.note(f"a head trained on these answers is kept: to remove it, delete the folder {folder}")
    if failed := [str(path) for each in made for path in each.failed]:
        raise SpecLocalError(
            f"copies of these answers could not be deleted: {', '.join(failed)}: check the permissions, and "
            "run specdec datastore clear again"
        )


def _answers(folder: Path) -> list[AnswerContents]:
    """What --learn has kept beside the texts in a folder of the datastore."""
    if not datastore.has_answers(folder):
        return []
    return [store.contents() for store in answer_stores(folder, render.note)]


def _is_model(argument: str) -> bool:
    """Return whether an argument, a file or a model, is none of the files to add."""
    return argument.endswith(".gguf") or not expanded(argument).exists()


def _described(contents: Contents, answers: Sequence[AnswerContents], set_aside: Sequence[Path]) -> str:
    rows = [
        ("models", ", ".join(contents.models)),
        ("texts", f"{contents.n_texts:,}"),
        ("tokens", f"{contents.n_tokens:,}"),
        ("size", format_size(contents.size)),
        *(("answers", _kept(each)) for each in answers),
        *(("damaged", f"{path.name}, set aside ({format_size(path.stat().st_size)})") for path in set_aside),
        ("path", str(contents.folder)),
    ]
    return "".join(f"{name:<8}{text}\n" for name, text in rows)


def _kept(answers: AnswerContents) -> str:
    """What --learn has kept of one model, in a line."""
    text = f"{answers.n_answers:,} of {answers.model or answers.path.name}"
    if answers.first is not None and answers.last is not None:
        text += f" ({_count(answers.n_tokens, 'token')}, {_date(answers.first)} to {_date(answers.last)})"
    return text


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
