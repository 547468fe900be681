"""Measure what the datastore gains where requests are variants of earlier ones.

    python benchmarks/repeating.py --main MAIN.gguf

The requests come in pairs, such as a class and the same class with one more method, or a letter to another
person. The first request of each pair is answered once, in a separate session that writes to the datastore.
The second one is then answered at temperature 0 by plain decoding, and by the adaptive policy without and
with the datastore; the variants alternate, and none of them writes to it. Rates exclude the time for the
prompt.
"""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common import chat_text, geometric_mean, machine, model_options, note, table, tokens_of

from spec_local import Done, GenerationSettings, SamplingSettings, Session
from spec_local.datastore.datastore import Datastore

# Each entry is a pair of requests; {first|second} is where they differ.
REQUESTS: Mapping[str, str] = {
    "class": "Write a Python class Stack with push, pop, peek{|, clear} and __len__, with a docstring for "
    "every method.",
    "letter": "Write a short letter that invites {Mrs Okafor|Mr Lindqvist} to the opening of our library on "
    "3 May at 5 pm, with thanks for {her donation of 200 books|his donation of 40 chairs}.",
    "tests": "Write pytest tests for a function slugify(text{|, sep}) that lowers letters, joins words by "
    "{hyphens|sep} and drops all other signs.",
    "script": "Write a bash script that backs up a folder given as first argument into a dated tar.gz in "
    "{~/backups|/var/backups}, with checks.",
    "query": "Write an SQL query for the {ten|five} customers with the highest total of orders in "
    "{2023|2024}, from tables customers(id, name) and orders(id, customer_id, total, created_at). "
    "Explain it.",
    "record": "Turn this into JSON with the keys name, street, city, phone and note, and explain each key in "
    "a sentence: {Anna Weber, Lindenweg 4, Ulm, phone 0731 55512, wants to be called after six"
    "|Jonas Pohl, Marktplatz 11, Kempten, phone 0831 20771, prefers letters}.",
    "recipe": "Give me a recipe for pancakes for {four|six} people, with a list of ingredients and numbered "
    "steps.",
    "explanation": "Explain in simple words how a refrigerator works, for a child of {ten|eight}.",
}


def request(name: str, version: int) -> str:
    """The first (0) or the second (1) request of a pair."""
    return re.sub(r"\{(.*?)\}", lambda match: match[1].split("|")[version], REQUESTS[name])


def main() -> None:
    arguments = model_options(__doc__, draft="none", n=192)
    arguments.add_argument("--runs", type=int, default=3, help="of each variant")
    options = arguments.parse_args()

    rows, speedups = [], {"without": list[float](), "with": list[float]()}
    with tempfile.TemporaryDirectory() as folder:

        def open_session() -> Session:
            return Session.open(options.main, n_ctx=options.ctx, threads=options.threads, prompt_cache="off")

        def open_datastore(session: Session, *, read_only: bool) -> Datastore:
            datastore = Datastore(Path(folder) / "texts", session.main.model.vocabulary.n_tokens)
            datastore.read_only = read_only
            return datastore

        def rate(
            session: Session, question: str, datastore: Datastore | None, *, plain: bool = False
        ) -> float:
            session.main.truncate(0)
            session.datastore = datastore
            model = session.main.model
            settings = GenerationSettings(
                SamplingSettings(temperature=0), max_tokens=options.n, proposer="none" if plain else "auto"
            )
            *_, last = session.generate(tokens_of(model, chat_text(model, question)), settings)
            assert isinstance(last, Done)
            return last.statistics.tokens_per_second

        with open_session() as session:
            for name in REQUESTS:
                note(f"{name}: the first request")
                rate(session, request(name, 0), open_datastore(session, read_only=False))
        with open_session() as session:
            datastore = open_datastore(session, read_only=True)
            variants = ["plain", "without", "with"]
            for name in REQUESTS:
                rates: dict[str, list[float]] = {variant: [] for variant in variants}
                for run in range(options.runs):
                    for variant in variants[run % 3 :] + variants[: run % 3]:
                        note(f"{name}: {variant}")
                        used = datastore if variant == "with" else None
                        rates[variant].append(rate(session, request(name, 1), used, plain=variant == "plain"))
                for variant, found in speedups.items():
                    pairs = zip(rates[variant], rates["plain"], strict=True)
                    found.append(geometric_mean([a / b for a, b in pairs]))
                rows.append([name, *(f"{found[-1]:.2f}" for found in speedups.values())])
    note("")
    print(f"main {options.main.name}, {len(rows)} pairs, {options.runs} runs; {machine()}\n")
    rows.append(["geometric mean", *(f"{geometric_mean(found):.2f}" for found in speedups.values())])
    table(["times plain", "without the datastore", "with it"], rows)


if __name__ == "__main__":
    main()
