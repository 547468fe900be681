"""`specdec draft convert`: convert a published head into a GGUF file for its main model."""

from spec_local.models import published_heads
from spec_local.models.names import resolve
from spec_local.system.files import expanded
from specdec_cli import render
from specdec_cli.models import download_progress
from specdec_cli.signatures.drafts import DraftConvertOptions


def convert(options: DraftConvertOptions) -> None:
    output = expanded(options.output) if options.output else None
    folder = expanded(options.head)
    if not folder.is_dir():
        with download_progress() as on_progress:
            folder = published_heads.fetch(options.head, render.note, on_progress)
    main = resolve(options.main) if options.main else published_heads.find_main(folder, options.head)
    path = published_heads.convert(
        folder, options.head, main, output, options.kind, force=options.force, log=render.note
    )
    render.write(f"{path}\n")
