"""A small vocabulary for tests of grammars, what a grammar accepts, and random answers under it."""

import numpy as np


class ByteVocabulary:
    """Every byte, some longer tokens, two end tokens and a control token."""

    longer = ("the", "th", "é", "éa", "🙂", '"}', '{"', "ab", "abc", "de", '","', '":1,"a":', "e9", "\\u00")
    end, turn, control = range(256 + len(longer), 256 + len(longer) + 3)
    n_tokens = control + 1
    eos, eot = end, turn

    def is_end(self, token):
        return token in (self.end, self.turn)

    def piece(self, token):
        if token < 256:
            return bytes([token])
        return self.longer[token - 256].encode() if token < self.end else b""

    def tokenize(self, text, *, parse_special=False):
        return [self.control] if text == "<|control|>" and parse_special else list(text.encode())

    def continuation(self, text, *, parse_special=True):
        """The longest tokens, from left to right."""
        raw, tokens = text.encode("utf-8", "surrogateescape"), []
        while raw:
            found = [t for t in range(self.end) if raw.startswith(self.piece(t))]
            tokens.append(max(found, key=lambda t: len(self.piece(t))))
            raw = raw[len(self.piece(tokens[-1])) :]
        return tokens


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


INTERESTING = np.frombuffer(b'aabb\\u00610019eE.-+"{}[]:,', np.uint8)
CLOSING = np.frombuffer(b'"}]', np.uint8)


def sample(grammar, rng, most=200):
    """Generate an answer from random tokens: repeated names, escapes and long numbers are frequent.

    Returns None if it does not end within twice `most` bytes.
    """
    state, answer = grammar.start(), bytearray()
    while True:
        mask = state.allowed()
        allowed = np.flatnonzero(mask)
        assert len(allowed), f"nothing is allowed after {bytes(answer)!r}"
        if mask[VOCABULARY.end] and (rng.random() < 0.2 or len(allowed) == 2 or len(answer) > most):
            return answer.decode()
        if len(answer) > 2 * most:
            return None
        bytes_ = allowed[allowed < VOCABULARY.end]
        kinds = [CLOSING[mask[CLOSING]]] * (1 + 3 * (len(answer) > most))
        kinds += [INTERESTING[mask[INTERESTING]]] * 8 + [bytes_]
        token = int(rng.choice(rng.choice([kind for kind in kinds if len(kind)])))
        answer += VOCABULARY.piece(token)
        state = state.after(token)
