"""Similar work again, with what was said before kept on disk: plain, without the store and with it.

    python benchmarks/repeating.py --main MAIN.gguf

People ask for variants: a class with one method more, a letter to somebody else, the same questions about the next record. The
first request of each pair is answered once and remembered, in a session of its own; then the second one is answered in
three ways, in turns, at temperature 0 by the adaptive policy. No way hears of the others' answers. Rates are of the time
after the prompt.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from common import chat_text, geometric_mean, machine, note, parser, table, tokens_of

from spec_local import Done, GenerationSettings, SamplingSettings, Session
from spec_local.datastore.text_store import Datastore
from spec_local.machine import default_threads

PAIRS: Mapping[str, tuple[str, str]] = {
    "class": (
        "Write a Python class Stack with push, pop, peek and __len__, with a docstring for every method.",
        "Write a Python class Stack with push, pop, peek, clear and __len__, with a docstring for every method.",
    ),
    "letter": (
        "Write a short letter that invites Mrs Okafor to the opening of our library on 3 May at 5 pm, with thanks for her "
        "donation of 200 books.",
        "Write a short letter that invites Mr Lindqvist to the opening of our library on 3 May at 5 pm, with thanks for his "
        "donation of 40 chairs.",
    ),
    "tests": (
        "Write pytest tests for a function slugify(text) that lowers letters, joins words by hyphens and drops all other signs.",
        "Write pytest tests for a function slugify(text, sep) that lowers letters, joins words by sep and drops all other signs.",
    ),
    "script": (
        "Write a bash script that backs up a folder given as first argument into a dated tar.gz in ~/backups, with checks.",
        "Write a bash script that backs up a folder given as first argument into a dated tar.gz in /var/backups, with checks.",
    ),
    "query": (
        "Write an SQL query for the ten customers with the highest total of orders in 2023, from tables customers(id, name) and "
        "orders(id, customer_id, total, created_at). Explain it.",
        "Write an SQL query for the five customers with the highest total of orders in 2024, from tables customers(id, name) and "
        "orders(id, customer_id, total, created_at). Explain it.",
    ),
    "record": (
        "Turn this into JSON with the keys name, street, city, phone and note, and explain each key in a sentence: Anna Weber, "
        "Lindenweg 4, Ulm, phone 0731 55512, wants to be called after six.",
        "Turn this into JSON with the keys name, street, city, phone and note, and explain each key in a sentence: Jonas Pohl, "
        "Marktplatz 11, Kempten, phone 0831 20771, prefers letters.",
    ),
    "recipe": (
        "Give me a recipe for pancakes for four people, with a list of ingredients and numbered steps.",
        "Give me a recipe for pancakes for six people, with a list of ingredients and numbered steps.",
    ),
    "explanation": (
        "Explain in simple words how a refrigerator works, for a child of ten.",
        "Explain in simple words how a refrigerator works, for a child of eight.",
    ),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--runs", type=int, default=3, help="of each way")
    arguments.add_argument("--n", type=int, default=192, help="tokens an answer, at most")
    arguments.add_argument("--ctx", type=int, default=2048)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()

    rows, ratios = [], {"without": list[float](), "with": list[float]()}
    with tempfile.TemporaryDirectory() as folder:

        def opened() -> Session:
            return Session.open(options.main, n_ctx=options.ctx, threads=options.threads)

        def stored(session: Session, learning: bool) -> Datastore:
            store = Datastore(Path(folder) / "texts", session.main.model.vocabulary.n_tokens)
            store.learning = learning
            return store

        def answer(session: Session, question: str, proposer: str, store: Datastore | None) -> float:
            session.main.truncate(0)
            session.datastore = store
            model = session.main.model
            how = GenerationSettings(
                SamplingSettings(temperature=0),
                max_tokens=options.n,
                proposer="none" if proposer == "plain" else "auto",
            )
            *_, last = session.generate(tokens_of(model, chat_text(model, question)), how)
            assert isinstance(last, Done)
            return last.statistics.tokens_per_second

        with opened() as session:
            for name, (first, _) in PAIRS.items():
                note(f"{name}: the first request")
                answer(session, first, "auto", stored(session, learning=True))
        with opened() as session:
            store = stored(session, learning=False)
            ways = {"plain": None, "without": None, "with": store}
            for name, (_, second) in PAIRS.items():
                rates: dict[str, list[float]] = {way: [] for way in ways}
                for run in range(options.runs):
                    for way in [*ways][run % 3 :] + [*ways][: run % 3]:
                        note(f"{name}: {way}")
                        rates[way].append(answer(session, second, way, ways[way]))
                gains = {
                    way: geometric_mean([a / b for a, b in zip(rates[way], rates["plain"], strict=True)])
                    for way in ratios
                }
                for way, gain in gains.items():
                    ratios[way].append(gain)
                rows.append([name, f"{gains['without']:.2f}", f"{gains['with']:.2f}"])
    note("")
    print(f"main {options.main.name}, {len(rows)} pairs, {options.runs} runs; {machine()}\n")
    means = [f"{geometric_mean(of):.2f}" for of in ratios.values()]
    table(["times plain", "without the store", "with it"], [*rows, ["geometric mean", *means]])


if __name__ == "__main__":
    main()
