"""Prompts without an answer: their number of tokens, and their text, for a body of each kind of chat."""

from collections.abc import Callable, Mapping
from typing import Any

from spec_local.text import printable

PROMPTS: Mapping[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "/v1/messages/count_tokens": ("/v1/messages", lambda text, n: {"input_tokens": n}),
    **{
        f"{version}/{kind}/input_tokens": (
            f"/v1/{kind}",
            lambda text, n: {"object": "response.input_tokens", "input_tokens": n},
        )
        for version in ("", "/v1")
        for kind in ("responses", "chat/completions")
    },
    "/apply-template": ("/v1/chat/completions", lambda text, n: {"prompt": printable(text)}),
}
"""For each path: the path whose bodies it takes, and the response for a prompt's text and token count."""
