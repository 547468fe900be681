"""Questions of six kinds, for figures that should not hang on one prompt."""

from collections.abc import Mapping, Sequence

_LETTER = """\
Dear Ms Okafor, thank you for your call on Tuesday. The replacement pump was sent from our depot in Lille on \
14 March and should reach you within three working days. Please keep the old pump in its box: our driver will take it \
back. The technician, Mr Dubois, can come on the 19th between 8 and 10 o'clock, or on the 21st after 14 o'clock. \
If neither suits you, call us on extension 412. There is nothing to pay, as the guarantee runs until August."""

_REPORT = """\
The bridge was closed for eleven weeks in 2019 while both cables were replaced. Inspections had found 214 broken \
wires, most of them where water had gathered behind the clamps. The new cables have a drain at every clamp and a \
sensor that reports humidity each hour. Since it opened again, traffic has grown by a quarter, and the council \
has decided that lorries above 18 tonnes must take the ferry. The next inspection is planned for May 2026."""

_FUNCTION = """\
def average(values):
    total = 0
    for v in values:
        total = total + v
    return total / len(values)
"""

_SORTER = """\
def sort_words(text):
    words = text.split()
    words.sort()
    result = ""
    for w in words:
        result = result + w + " "
    return result
"""

QUESTIONS: Mapping[str, Sequence[str]] = {
    "code": [
        "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
        "Write a Python class Stack with push, pop, peek and is_empty, raising IndexError when it is empty.",
        "Write a SQL query that gives the three customers with the highest total of orders in 2024.",
        "Write a JavaScript function that debounces another function, with a comment on each step.",
    ],
    "editing": [
        f"Rename `values` to `numbers`, add type hints and handle an empty list:\n\n```python\n{_FUNCTION}```",
        f"Make this shorter with join, keep its behaviour, and add a docstring:\n\n```python\n{_SORTER}```",
        f"Correct nothing but make this letter more formal, and give it whole:\n\n{_LETTER}",
        f"Put the numbers in this text into words and leave all else as it is:\n\n{_REPORT}",
    ],
    "conversation": [
        "I have a free weekend and a bicycle. What should I think of before I ride to the sea, 80 km away?",
        "Why does bread rise, and why does mine not?",
        "Tell me a short story about a clockmaker who repairs a clock that runs backwards.",
        "What are the advantages and disadvantages of living in a small town?",
    ],
    "translation": [
        f"Translate into German:\n\n{_LETTER}",
        f"Translate into Spanish:\n\n{_REPORT}",
        "Translate into French: The library is closed on Mondays, but you can return your books at any hour "
        "through the box beside the door.",
        "Translate into Italian: My grandmother grew tomatoes on her balcony, and every summer she gave half "
        "of them to the neighbours.",
    ],
    "summary": [
        f"Summarise this letter in two sentences:\n\n{_LETTER}",
        f"Give the most important facts of this text as a list:\n\n{_REPORT}",
        f"What has to be done, by whom and when?\n\n{_LETTER}",
        f"Why was the bridge closed, and what has changed? Answer with quotations.\n\n{_REPORT}",
    ],
    "mathematics": [
        "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show each step.",
        "Solve 3x + 7 = 2(x - 4) + 21 step by step.",
        "A rectangle has a perimeter of 54 cm and is twice as long as it is wide. What is its area?",
        "What is the probability of throwing at least one six with three rng? Explain.",
    ],
}
"""Four questions per category."""
