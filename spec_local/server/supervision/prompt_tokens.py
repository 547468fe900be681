"""The tokens of prompts that are used without a chat template, as llama.cpp's server makes them."""

from collections.abc import Callable, Sequence

from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.media import Media
from spec_local.llama.vocabulary import Vocabulary
from spec_local.server.supervision.events import Infill, Prompt
from spec_local.text import bytes_of

_PROJECT = "myproject\n"  # llama.cpp's name for the repository of a gap
_FILE = "filename\n"  # and for its file
_LONGEST = 256  # characters of a token
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a file, for models without a token for that


ImageTokens = Callable[[Media], Sequence[int]]
"""The tokens and cells of an image: see `Model.image_tokens`."""


def _no_images(image: Media) -> Sequence[int]:
    raise InvalidRequest("an image cannot stand here: put it into the prompt")


def prompt_tokens(
    vocabulary: Vocabulary,
    prompt: Prompt,
    n_ctx: int,
    *,
    parse_special: bool,
    image_tokens: ImageTokens = _no_images,
) -> list[int]:
    """The tokens of a text, of token ids, of images, or of all of them mixed.

    An empty prompt begins a text: it is the token with which texts begin, or that which separates them.

    Args:
        n_ctx: length of the context in tokens.
        parse_special: see `Vocabulary.tokenize`.

    Raises:
        InvalidRequest: it is empty, and there is no such token; or an image cannot be prepared.
        ContextOverflow: it is certainly longer than the context; then it is not tokenized.
    """
    texts = [prompt] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, str)]
    vocabulary.check_length(b"".join(map(bytes_of, texts)), n_ctx)
    options = {"add_special": True, "parse_special": parse_special}
    tokens = mixed_tokens(vocabulary, prompt, image_tokens=image_tokens, **options)
    if not tokens:
        tokens = [token for token in (vocabulary.bos, vocabulary.eos, vocabulary.eot) if token >= 0][:1]
    if not tokens:
        raise InvalidRequest("prompt is empty, and this model has no token that begins a text: give text")
    return tokens


def mixed_tokens(
    vocabulary: Vocabulary,
    prompt: Prompt,
    *,
    add_special: bool = False,
    parse_special: bool = False,
    image_tokens: ImageTokens = _no_images,
) -> list[int]:
    """As `prompt_tokens`, but an empty prompt has no tokens.

    Beside an image, each text is tokenized for itself, as by libmtmd.
    """
    tokens = list[int]()
    parts = [prompt] if isinstance(prompt, str) else prompt
    for i, part in enumerate(parts):
        if isinstance(part, Media):
            if i == 0 and add_special:
                tokens += vocabulary.tokenize("", add_special=True)
            tokens += image_tokens(part)
        elif isinstance(part, int):
            if part >= vocabulary.n_tokens:
                raise InvalidRequest(f"prompt has token {part}: give 0 to {vocabulary.n_tokens - 1}")
            tokens.append(part)
        elif i == 0 or isinstance(parts[i - 1], Media):
            first = add_special and i == 0
            tokens += vocabulary.tokenize(part, add_special=first, parse_special=parse_special)
        else:
            tokens += vocabulary.continuation(part, parse_special=parse_special)
    return tokens


def infill_tokens(vocabulary: Vocabulary, gap: Infill, n_ctx: int, n_predict: int | None) -> list[int]:
    """The tokens of a gap in a file, after other files of its project.

    A quarter of the context, or what is needed, is left for the answer. The text around the gap gets three
    quarters of the rest, three parts of that before the gap and one after it. What they leave, up to half of
    the context, is for the ends of the other files: while the text around the gap grows, these then begin
    with the same token, and stay in the cache.

    Args:
        n_ctx: length of the context in tokens.
        n_predict: maximum length of the answer; None: as long as the context allows.

    Raises:
        ModelError: the model has no tokens for gaps.
    """
    if not vocabulary.fill_in:
        raise ModelError(
            "this model has no fill-in-the-middle tokens, which /infill needs: use a model trained for code, "
            "such as Qwen2.5-Coder"
        )
    prefix, suffix, middle = vocabulary.fill_in
    answer = n_ctx // 4 if n_predict is None else min(n_predict, n_ctx // 4)
    room = max(0, n_ctx - answer - 8)  # 8: the special tokens
    around = room * 3 // 4
    most = n_ctx * _LONGEST  # of a long text, only this part is tokenized
    started = mixed_tokens(vocabulary, _last(gap.prompt, most))
    before = [*mixed_tokens(vocabulary, _last(gap.prefix, most)), *started]
    before = before[len(before) - min(len(before), around * 3 // 4) :]
    suffix_text = gap.suffix[:most] if isinstance(gap.suffix, str) else gap.suffix
    after = mixed_tokens(vocabulary, suffix_text)[: around // 4]
    room = min(room - len(before) - len(after), n_ctx // 2)
    others = _other_files(vocabulary, gap.extra, room, most)
    bos = [vocabulary.bos] if vocabulary.add_bos else []
    return [*others, *bos, prefix, *before, suffix, *after, middle]


def _last(prompt: Prompt, most: int) -> Prompt:
    return prompt[-most:] if isinstance(prompt, str) else prompt


def _other_files(vocabulary: Vocabulary, files: Sequence[tuple[str, str]], room: int, most: int) -> list[int]:
    """The last `room` tokens of other files; most: characters of each that are tokenized."""
    repository, separator = vocabulary.repository, vocabulary.file_separator
    parts = [] if separator is None else [[separator, *vocabulary.tokenize(_FILE)]]  # the last one first
    n = sum(map(len, parts))
    for name, text in reversed(files):
        start = vocabulary.tokenize(_SNIPPET if separator is None else f"{name}\n")
        before = [] if separator is None else [separator]
        parts.append([*before, *start, *vocabulary.tokenize(text[-most:])])
        n += len(parts[-1])
        if n >= room:
            break
    else:
        parts.append([] if repository is None else [repository, *vocabulary.tokenize(_PROJECT)])
    tokens = [token for part in reversed(parts) for token in part]
    return tokens[len(tokens) - min(len(tokens), room) :]
