"""`specdec draft convert`: convert a published head into a GGUF file for its main model."""

from spec_local.conversion.convert import convert_head
from spec_local.errors import InvalidRequest
from spec_local.models.names import resolve
from spec_local.system.files import expanded
from specdec_cli import progress, render
from specdec_cli.signatures.draft import DraftConvertOptions


def convert(options: DraftConvertOptions) -> None:
    folder = expanded(options.head)
    if not options.main:
        raise InvalidRequest(
            "the main model is missing: give the one that the head was trained for with --main"
        )
    main = resolve(options.main)
    output = expanded(options.output) if options.output else None
    with progress.busy(f"converting {options.head}"):
        path = convert_head(folder, main, output, options.kind, force=options.force)
    render.write(f"{path}\n")
