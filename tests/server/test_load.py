"""Some seconds of what `tests.load` does for minutes."""

import asyncio
import os
import re

from tests import load
from tests.server.conftest import Server

SECONDS, N_CLIENTS = 6, 32


def test_rude_clients(specdec, arguments):
    server = Server(specdec, *arguments, "--queue", 16)
    try:
        seen, before, after = asyncio.run(load.run(server.address, server.process.pid, SECONDS, N_CLIENTS))
        assert seen.failures == []
        kinds = {"whole", "stream", "stay_away", "give_up", "give_up_waiting", "garbage", "no_http", "ask"}
        assert kinds <= set(seen.counts)
        assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
        # asyncio's pool, which prepares requests, starts a thread only when all others are busy.
        assert after.threads <= before.threads + min(32, (os.cpu_count() or 1) + 4)
        assert after.files <= before.files + 2  # a connection that is just being closed
        # Nothing was lost: what was answered is counted, and nothing more than was asked for.
        ends = re.findall(
            r'request_success_total\{finished_reason="(\w+)"\} (\S+)', server.get("/metrics").text
        )
        ended = {reason: float(n) for reason, n in ends}
        assert set(ended) <= {"length", "stop", "cancelled"}
        asked = sum(
            n for kind, n in seen.counts.items() if kind not in ("garbage", "no_http", "ask", "refused")
        )
        assert sum(ended.values()) <= asked - seen.counts["refused"]
        complete = seen.counts["whole"] + seen.counts["stream"] + seen.counts["stay_away"]
        assert ended["length"] + ended.get("stop", 0) >= complete - seen.counts["refused"]
    finally:
        code, errors = server.stop()
    assert (code, errors) == (0, "")
