"""``specdec serve --learn``: the answers of its clients are kept, also when its processes are killed."""

import signal
from concurrent.futures import ThreadPoolExecutor

from spec_local.datastore.answer_store import AnswerStore
from tests.server.conftest import Server
from tests.waiting import wait_until


def kept(folder):
    """The answers of the only store below a cache folder."""
    [path] = folder.glob("specdec/texts/*/*.answers")
    return AnswerStore(path).answers()


def test_answers_of_requests_are_kept(specdec, arguments, tmp_path):
    cache = tmp_path / "cache"
    with Server(specdec, *arguments, "--learn", env={"XDG_CACHE_HOME": str(cache)}) as server:
        assert kept(cache) == []
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda n: server.chat(f"question {n}"), range(8)))
        answers = kept(cache)
        assert len(answers) == 8
        usage = [(reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) for reply in replies]
        assert sorted((each.n_prompt, len(each.tokens) - each.n_prompt) for each in answers) == sorted(usage)

        engine = server.engine.pid
        server.engine.send_signal(signal.SIGKILL)
        wait_until(lambda: server.get("/health").status_code == 200 and server.engine.pid != engine)
        server.chat("after a crash")
        assert [each.number for each in kept(cache)[:8]] == [each.number for each in answers]
        assert len(kept(cache)) == 9
        server.engine.send_signal(signal.SIGKILL)
    assert len(kept(cache)) == 9
