"""Check whether two models share a vocabulary, so that token ids of one are valid for the other.

The rule is llama.cpp's own (common/speculative.cpp): same tokenizer type, same handling of the
beginning- and end-of-sequence tokens, sizes within 128 of each other, and equal token texts from id 5 on.
"""

from spec_local.llama.vocabulary import Vocabulary

MAX_SIZE_DIFFERENCE = 128
"""In tokens: padding that training frameworks add."""
FIRST_COMPARED = 5
"""The special tokens before it differ between instruct and base models."""


def difference(main: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why two vocabularies are incompatible, or None if they are compatible."""
    if main.type != draft.type:
        return "their tokenizers are of different types"
    for name, added in (("bos", "add_bos"), ("eos", "add_eos")):
        adds = getattr(main, added)
        if adds != getattr(draft, added) or (adds and getattr(main, name) != getattr(draft, name)):
            return f"they differ in the {name} token"
    if abs(main.n_tokens - draft.n_tokens) > MAX_SIZE_DIFFERENCE:
        return f"{main.n_tokens} tokens against {draft.n_tokens}"
    n = min(main.n_tokens, draft.n_tokens)
    for token, (a, b) in enumerate(zip(main.texts(n), draft.texts(n), strict=True)):
        if a != b and token >= FIRST_COMPARED:
            return (
                f"token {token} is {a.decode('utf-8', 'replace')!r} against {b.decode('utf-8', 'replace')!r}"
            )
    return None
