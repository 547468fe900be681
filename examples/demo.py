"""`make demo`: speculative decoding on the starter model, with the measured speed-up or slow-down.

    python examples/demo.py

Compares plain decoding, prompt lookup, a draft model and the adaptive policy, which chooses between the two.
The draft model was trained on the starter's output and comes with specdec. Its calls take a thirtieth of the
main model's time, and it predicts a third of the main model's tokens.
"""

import statistics
import sys

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.models import catalog

TEXT = """\
The lighthouse at Cape Verity was built in 1871 by the engineer Ada Brandt. It stands 42 metres high and its \
light can be seen for 30 kilometres. In 1911 the oil lamp was replaced by an electric one, and since 1988 \
nobody has lived there: the light is switched on and off by a clock."""
PROMPT = f"Repeat the following text word for word.\n\n{TEXT}"
ROUNDS = 3


def main() -> None:
    starter = catalog.pull("starter")
    draft = catalog.pull("starter-draft")
    with Session.open(starter, draft, n_ctx=1024, log=print) as session:
        model = session.main.model
        prompt = Conversation(model, ChatTemplate(model)).ask(PROMPT)
        variants = {
            "plain decoding": {"proposer": "none"},
            "prompt lookup, 8 per step": {"proposer": "lookup", "policy": "fixed", "draft_max": 8},
            "draft model, 4 per step": {"proposer": "draft", "policy": "fixed", "draft_max": 4},
            "adaptive policy": {},
        }
        speeds: dict[str, list[float]] = {name: [] for name in variants}
        texts: dict[str, str] = dict.fromkeys(variants, "")
        for round_ in range(ROUNDS):
            # Interleaved, so that other load on the machine affects all variants.
            for name, options in variants.items():
                settings = GenerationSettings(
                    sampling=SamplingSettings(temperature=0), max_tokens=96, **options
                )
                if round_ == 0:
                    print(f"\n── {name} " + "─" * (60 - len(name)))
                for event in session.generate(prompt, settings):
                    if round_ == 0 and isinstance(event, Text):
                        texts[name] += event.text
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                s = event.statistics
                speeds[name].append(s.tokens_per_second)
                if round_ == 0:
                    print(
                        f"\n[{s.tokens_per_second:.1f} tokens/s"
                        f" · {s.predicted_n} tokens in {s.n_steps} steps"
                        f" · accepted {s.draft_n_accepted} of {s.draft_n} draft tokens]"
                    )
    plain = statistics.median(speeds["plain decoding"])
    print(f"\nMedian of {ROUNDS} interleaved runs, compared with plain decoding:")
    for name, measured in speeds.items():
        ratio = statistics.median(measured) / plain
        verdict = (
            "baseline"
            if name == "plain decoding"
            else "faster"
            if ratio > 1.02
            else "slower"
            if ratio < 0.98
            else "no difference"
        )
        print(f"  {name:<31} {statistics.median(measured):7.1f} tokens/s  {ratio:5.2f} ×  {verdict}")
    same = "the same text" if texts["adaptive policy"] == texts["plain decoding"] else "another text"
    ratio = statistics.median(speeds["adaptive policy"]) / plain
    print(f"\nspecdec's default, the adaptive policy: {ratio:.1f} times as fast as without drafts, {same}.")


if __name__ == "__main__":
    main()
