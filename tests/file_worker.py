"""Use many files in one child process, which a damaged file may crash or hang."""

import json
import os
import select
import subprocess
import sys


class FileWorker:
    """A child process that reads paths from stdin, and is replaced after a crash or a hang.

    Args:
        script: Python code that prints JSON lines ``[kind, detail]`` for each path.
        log: file for stderr.
        deadline: seconds to wait for a line.
        arguments: of the script.
    """

    def __init__(self, script, log, deadline, *arguments):
        self._command, self._log, self._deadline = [sys.executable, "-c", script, *arguments], log, deadline
        self._child = None

    def send(self, path):
        if self._child is None:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
                bufsize=0,
            )
        self._child.stdin.write(os.fsencode(path) + b"\n")

    def receive(self):
        """The next line, or ``crash`` and the exit status, or ``hang``."""
        if not select.select([self._child.stdout], [], [], self._deadline)[0]:
            self.end()
            return "hang", ""
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            self.end()
            return "crash", str(code)
        kind, detail = json.loads(line)
        return kind, detail

    def end(self):
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None
