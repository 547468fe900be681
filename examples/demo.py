"""What `make demo` shows: real speculation on the starter model, and honestly what it gains or loses.

    python examples/demo.py

A prompt is answered plainly, with prompt lookup, with a draft model in a second llama.cpp context, and by the adaptive
policy, which takes of both what pays. The draft was trained on what the starter says, by specdec draft train, and comes
with specdec: a call of it costs a thirtieth of main's, and it guesses a third of main's tokens right.
"""

import statistics
import sys

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.models import catalog

TEXT = """\
The lighthouse at Cape Verity was built in 1871 by the engineer Ada Brandt. It stands 42 metres high and its light \
can be seen for 30 kilometres. In 1911 the oil lamp was replaced by an electric one, and since 1988 nobody has \
lived there: the light is switched on and off by a clock."""
PROMPT = f"Repeat the following text word for word.\n\n{TEXT}"
ROUNDS = 3


def main() -> None:
    starter = catalog.pull("starter")
    draft = catalog.pull("starter-draft")
    with Session.open(starter, draft, n_ctx=1024, log=print) as session:
        model = session.main.model
        prompt = Conversation(model, ChatTemplate(model)).ask(PROMPT)
        ways = {
            "plain decoding": {"proposer": "none"},
            "prompt lookup, 8 a step": {"proposer": "lookup", "policy": "fixed", "draft_max": 8},
            "the trained draft, 4 a step": {"proposer": "draft", "policy": "fixed", "draft_max": 4},
            "adaptive, what pays of both": {},
        }
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(ROUNDS):
            # interleaved, so that a busy moment of the machine does not hit one way only
            for way, choice in ways.items():
                settings = GenerationSettings(
                    sampling=SamplingSettings(temperature=0), max_tokens=96, **choice
                )
                if round_ == 0:
                    print(f"\n── {way} " + "─" * (60 - len(way)))
                for event in session.generate(prompt, settings):
                    if round_ == 0 and isinstance(event, Text):
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                s = event.statistics
                speeds[way].append(s.tokens_per_second)
                if round_ == 0:
                    print(
                        f"\n[{s.tokens_per_second:.1f} tokens/s · {s.predicted_n} tokens in {s.n_steps} steps"
                        f" · accepted {s.draft_n_accepted} of {s.draft_n} guesses]"
                    )
    plain = statistics.median(speeds["plain decoding"])
    print(f"\nMedian of {ROUNDS} interleaved runs, against plain decoding:")
    for way, measured in speeds.items():
        ratio = statistics.median(measured) / plain
        verdict = (
            "the measure"
            if way == "plain decoding"
            else "faster"
            if ratio > 1.02
            else "slower"
            if ratio < 0.98
            else "no difference"
        )
        print(f"  {way:<31} {statistics.median(measured):7.1f} tokens/s  {ratio:5.2f} ×  {verdict}")


if __name__ == "__main__":
    main()
