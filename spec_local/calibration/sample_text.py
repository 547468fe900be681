"""A text whose tokens are timed: in a mixture of experts, a call takes longer the more its tokens differ."""

from collections.abc import Sequence

from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.sequence import LlamaSequence

_TEXT = """\
The ferry left the harbour at seven, an hour before the fog came in from the north. Most passengers stayed \
below deck, read their newspapers and drank coffee; only two children stood at the rail and counted gulls. \
"How far is the island?" asked the younger one. "About twelve kilometres," said her brother, who had looked \
it up, "so we should see the lighthouse soon." The captain knew better. In weather like this nobody would \
see anything until the bell of the first buoy could be heard.

def mean_speed(positions, times):
    # Distance over time, in metres per second; zero if nothing moved.
    total = sum(abs(b - a) for a, b in zip(positions, positions[1:]))
    if not total or times[-1] <= times[0]:
        return 0.0
    return total / (times[-1] - times[0])

In 1821 the company owned 14 ships, 9 of them built of oak. Insurance cost about 6 % of a ship's value each \
year, which explains why small owners shared vessels: a loss then ruined none of them.
"""


def sample_tokens(sequence: LlamaSequence | HeadSequence) -> Sequence[int]:
    """Prose and code as tokens of the context's model; empty for a head, whose file may have no tokenizer."""
    return () if isinstance(sequence, HeadSequence) else sequence.model.vocabulary.tokenize(_TEXT)
