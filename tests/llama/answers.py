"""What the events of an answer contain."""

from spec_local.core.sampling import SamplingSettings
from spec_local.session import Prefilled, Text
from spec_local.settings import GenerationSettings
from tests.recorded_calls import record_calls


def tokens_of(events):
    return [token for event in events if isinstance(event, Text) for token in event.tokens]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def counted(session, prompt, **settings):
    """The events of an answer, and the number of prompt tokens that each model read. By default, greedy."""
    calls = [record_calls(context) for context in (session.main, session.draft) if context]
    usual = {"sampling": SamplingSettings(temperature=0), "policy": "fixed", "max_tokens": 20}
    events, read = [], None
    for event in session.generate(prompt, GenerationSettings(**usual | settings)):
        events.append(event)
        if isinstance(event, Prefilled):
            read = [sum(call.n_tokens for call in seen) for seen in calls]
    assert read[0] == events[-1].statistics.prompt_n
    return events, read


def drafts_of(session):
    """The text of a greedy answer with chains of two draft tokens, its steps, and the tokens accepted."""
    how = GenerationSettings(
        SamplingSettings(temperature=0), max_tokens=40, policy="fixed", proposer="draft", draft_max=2
    )
    events = list(session.generate("the of and to in is you", how))
    statistics = events[-1].statistics
    return text_of(events), statistics.n_steps, statistics.draft_n_accepted
