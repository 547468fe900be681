"""Messages whose beginning stays the same: headers that are left out, and times of day that are frozen."""

import pytest

from spec_local.server.supervision.stable_prompts import StablePrompts

HEADER = "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch={}; "
QUESTION = {"role": "user", "content": "It is 13:39. Is this right?"}


class Clients:
    """Requests with a system message each, at given times."""

    def __init__(self):
        self.now = 1000.0
        self.prompts = StablePrompts(lambda: self.now)

    def ask(self, *system, role="system"):
        """Return the system messages as the model sees them."""
        given = [{"role": role, "content": text} for text in system]
        *shown, last = self.prompts.stable([*given, QUESTION])
        assert last == QUESTION
        return [message["content"] for message in shown]


@pytest.fixture
def clients():
    return Clients()


def test_other_messages_stay_as_they_are(clients):
    messages = [{"role": "system", "content": "Be kind."}, QUESTION, {"role": "assistant", "content": ""}]
    assert clients.prompts.stable(messages) == messages
    text = HEADER.format("a") + "\nHello"
    assert clients.prompts.stable([{"role": "user", "content": text}])[0]["content"] == text


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ([HEADER.format("0a1b2") + "\nYou write code."], ["You write code."]),
        ([HEADER.format("0a1b2").upper() + "\r\nYou write code."], ["You write code."]),
        ([HEADER.format("0a1b2") + "\n" + HEADER.format("3") + "\nYou write code."], ["You write code."]),
        (["\n" + HEADER.format("0a1b2") + "\n\nYou write code."], ["\nYou write code."]),
        ([HEADER.format("0a1b2"), "You write code."], ["You write code."]),
        ([HEADER.format("0a1b2") + "\n"], []),
        (["Log the line\n" + HEADER.format("1")], ["Log the line\n" + HEADER.format("1")]),
        (["x-anthropic-billing-headers are: none"], ["x-anthropic-billing-headers are: none"]),
        (["Say x-anthropic-billing-header: 1\nHi"], ["Say x-anthropic-billing-header: 1\nHi"]),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_lines_with_headers_are_left_out(clients, system, shown, role):
    assert clients.ask(*system, role=role) == shown


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("2026-11-28T13:39:28Z", "2026-11-28T13:41:58Z"),
        ("2026-11-28T13:39:28.120+02:00", "2026-11-28T13:41:58.007+02:00"),
        ("2026-11-28 13:39:28", "2026-11-28 13:41:58"),
        ("13:39", "13:41"),
        ("13:59:28.", "14:01:58."),
        ("9:59", "10:01"),
        ("1:39 PM", "1:41 PM"),
        ("11:59 a.m.", "12:01 p.m."),
        ("1:39\u202fPM", "1:41\u202fPM"),
        ("11/28/2026, 12:59:28 pm", "11/28/2026, 1:01:58 pm"),
        ("Sat Nov 28 13:39:28 UTC 2026", "Sat Nov 28 13:41:58 UTC 2026"),
        (
            "Sat Nov 28 2026 13:39:28 GMT+0000 (Coordinated Universal Time)",
            "Sat Nov 28 2026 13:41:58 GMT+0000 (Coordinated Universal Time)",
        ),
        ("23:59:10", "0:01:40"),  # without a date, midnight passes
    ],
)
def test_a_time_of_day_stays_that_of_the_first_request(clients, first, later):
    text = "You help.\nNow: {}\nThe shop opens at 08:30."
    assert clients.ask(text.format(first), "More.") == [text.format(first), "More."]
    clients.now += 150
    assert clients.ask(text.format(later), "More.") == [text.format(first), "More."]
    assert clients.ask(text.format(later)) == [text.format(later)]  # another conversation


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("2026-11-28T13:39:28Z", "2026-11-29T13:41:58Z"),  # another date
        ("November 28, 2026 13:39", "November 29, 2026 13:41"),
        ("2026-11-28", "2026-11-29"),
        ("13:39:28+01:00", "13:41:58+02:00"),  # another offset
        ("13:39:28+01:00", "13:39:28+01:02"),
        ("13:39 in Rome", "13:41 in Oslo"),  # another word
        ("13:39", "13:41:58"),  # another form
        ("1:39 PM", "1:41 pm"),
        ("13:39", "15:41"),  # an appointment, not a clock
        ("13:39", "13:36"),
        ("1:39 AM", "1:41 PM"),
        ("Open 13:39-17:00", "Open 13:41-17:02"),  # the end of a range stays
        ("fe80::13:39", "fe80::13:41"),  # addresses and versions
        ("1.13:39", "1.13:41"),
        ("13:39:28:01", "13:41:58:01"),
        ("25:39", "25:41"),
        ("\0" + "13:39", "\0" + "13:41"),
    ],
)
def test_another_text_is_never_replaced(clients, first, later):
    clients.ask(f"Now: {first}.")
    clients.now += 150
    assert clients.ask(f"Now: {later}.") == [f"Now: {later}."]


def test_all_times_that_differ_are_clocks(clients):
    clients.ask("Now 13:39, call at 14:00.")
    clients.now += 60
    assert clients.ask("Now 13:40, call at 15:00.") == ["Now 13:40, call at 15:00."]
    clients.now += 60
    assert clients.ask("Now 13:41, call at 15:00.") == ["Now 13:40, call at 15:00."]


def test_a_time_is_at_most_an_hour_old(clients):
    clients.ask("Now 13:00.")
    clients.now += 3599
    assert clients.ask("Now 14:00.") == ["Now 13:00."]
    clients.now += 2
    assert clients.ask("Now 14:00.") == ["Now 14:00."]
    clients.now += 600
    assert clients.ask("Now 14:10.") == ["Now 14:00."]


def test_a_time_before_midnight_is_not_an_hour_later(clients):
    clients.ask("Now 23:59:59.")
    clients.now += 3600
    assert clients.ask("Now 0:00:00.") == ["Now 0:00:00."]


def test_only_the_last_texts_are_known(clients):
    clients.ask("Now 13:00.", "0")
    for name in range(1, 32):
        clients.ask("Now 13:00.", str(name))
    clients.now += 60
    assert clients.ask("Now 13:01.", "0") == ["Now 13:00.", "0"]
    clients.ask("Now 13:01.", "32")  # in the place of the one that was used longest ago
    assert clients.ask("Now 13:01.", "0") == ["Now 13:00.", "0"]
    assert clients.ask("Now 13:01.", "1") == ["Now 13:01.", "1"]


def test_the_time_of_a_question_is_kept(clients):
    messages = [{"role": "system", "content": "Help."}, {"role": "user", "content": "It is 13:39."}]
    assert clients.prompts.stable(messages) == messages
    clients.now += 60
    messages[1]["content"] = "It is 13:40."
    assert clients.prompts.stable(messages) == messages
