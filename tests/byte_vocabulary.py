"""A small vocabulary for tests of grammars, and whether a grammar accepts a text."""

import numpy as np


class ByteVocabulary:
    """Every byte, some longer tokens, two end tokens and a control token."""

    longer = ("the", "th", "é", "éa", "🙂", '"}', '{"', "ab", "abc", "de", '","', '":1,"a":', "e9", "\\u00")
    end, turn, control = range(256 + len(longer), 256 + len(longer) + 3)
    n_tokens = control + 1

    def is_end(self, token):
        return token in (self.end, self.turn)

    def piece(self, token):
        if token < 256:
            return bytes([token])
        return self.longer[token - 256].encode() if token < self.end else b""

    def tokenize(self, text, *, parse_special=False):
        return [self.control] if text == "<|control|>" and parse_special else list(text.encode())


VOCABULARY = ByteVocabulary()
END = np.array([VOCABULARY.end])


def after(grammar, text):
    """The state after a text, read byte by byte; None: the text is not allowed."""
    state = grammar.start()
    for byte in text.encode("utf-8", "surrogateescape"):
        state = state.after(byte) if state else None
    return state


def accepts(grammar, text):
    """Return whether a text is allowed and complete."""
    state = after(grammar, text)
    return state is not None and bool(state.allows(END)[0])
