"""The ledger: seconds that drafting saved each answer, or cost it, by cause.

A step is compared with the plain steps that would have generated its tokens at the same moment. Times are as
measured: the causes add up to what the user saw. Plain steps are the reference, and their noise is no loss.
"""

from collections.abc import Sequence

from spec_local.core.calls import Timer
from spec_local.engine.request import Request


def book(
    timer: Timer,
    calls: Sequence[tuple[int, int]],
    steps: Sequence[tuple[Request, int]],
    waiting: Sequence[Request],
) -> None:
    """Book a step; see `Statistics.saved_s` for the causes.

    Args:
        timer: of the step.
        calls: of each of its calls of the main model: requests that decoded, and tokens of prompts.
        steps: requests that decoded, with the number of generated tokens.
        waiting: requests that have not begun to decode.
    """
    draft_model = timer.parts.get("draft model", 0.0)
    drafting = timer.parts.get("propose", 0.0) + draft_model
    drafted = any(request.proposal.tokens for request, _ in steps)
    n_calls = sum(n_decoding > 0 for n_decoding, _ in calls)  # several if requests do not share a context
    for request, n_tokens in steps:
        if (plain := request.plain_s) is None:
            continue
        cause = request.proposal.source
        if cause == "none":
            own = request.head and not drafted  # its head reads what steps without a draft have left
            cause = ("draft" if own else "others") if drafted or draft_model else "searching"
        saved = -drafting
        if drafted:
            reading = timer.parts.get("pictures", 0.0) + _reading(timer, calls, plain)
            saved = n_tokens * n_calls * plain - timer.seconds + reading
        request.statistics.saved_s[cause] += saved
    for request in waiting:
        if request.plain_s is not None:
            request.statistics.saved_s["others" if drafted else "reading"] -= drafting


def _reading(timer: Timer, calls: Sequence[tuple[int, int]], plain: float) -> float:
    """Seconds of the main model's calls that plain steps would also have spent on reading prompts.

    In a call with a part of a prompt, which is long, all tokens take about equally long. What exceeds a plain
    call and the draft tokens' part is due to the prompt.
    """
    seconds = 0.0
    main = [call for call in timer.calls if call.part == "main model"]
    for call, (n_decoding, n_read) in zip(main, calls, strict=True):
        if n_read:
            n_more = call.n - n_read - n_decoding
            seconds += call.seconds - (plain if n_decoding else 0.0) - n_more * call.seconds / call.n
    return seconds
