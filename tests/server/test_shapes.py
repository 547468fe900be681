"""The shapes of responses are those that clients' own types describe: see tools/compare_servers.py."""

import httpx

from tools.compare_servers import Answered, ask, differences, requests

REFUSED = [
    '/v1/chat/completions {"messages": []}',
    '/v1/chat/completions {"messages": [{"role": "nobody", "content": "Hi"}]}',
    '/v1/chat/completions {"temperature": "warm"}',
    '/v1/completions {"prompt": {"x": 1}}',
    '/v1/responses {"previous_response_id": "resp_1"}',
    '/v1/messages {"messages": []}',
]


def test_shapes(server):
    refused = []
    with httpx.Client(base_url=server.address, timeout=60) as client:
        for asked in requests():
            answered = ask(client, asked)
            assert answered.status in (200, 400), asked
            assert not answered.wrong, (asked, answered.wrong)
            if answered.status == 400:
                refused.append(asked.name)
    assert refused == REFUSED


def test_differences():
    ours, other = Answered(200, frozenset({"a"}), None), Answered(200, frozenset({"a", "a.b"}), None)
    assert differences([ours]) == differences([other, ours]) == ""
    assert differences([ours, other]) == "lacks a.b"
    assert differences([Answered(200, frozenset(), "no id"), Answered(500, frozenset(), None)]) == (
        "no id; status 200 500"
    )
