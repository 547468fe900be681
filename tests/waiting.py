"""Wait for what happens elsewhere, such as in another process."""

import time


def wait_until(condition, timeout=30):
    """Wait until a condition holds; a test on a busy machine needs seconds for what takes milliseconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
