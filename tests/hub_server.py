"""A local HTTP server that behaves like the Hugging Face Hub, with failures on demand."""

import contextlib
import functools
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


def commit_of(text):
    """A commit hash made from a text."""
    return hashlib.sha1(text.encode()).hexdigest()


def git_hash(content):
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Refusal:
    """An HTTP error response."""

    status: int
    headers: dict = field(default_factory=dict)


class HubServer:
    """A context manager; `url` is the value for HF_ENDPOINT.

    requests: received requests, as (kind, path, Range header, Authorization header); kinds are list, head,
    resolve, bytes, other. refusals: kind -> Refusal. cuts: numbers of bytes after which the next transfers
    end. wrong: bytes to send instead, by SHA-256. ranges: whether range requests are supported. gate: called
    before bytes are sent. in_git: names of files without a SHA-256. hostile: kind -> a function that answers
    the request (a BaseHTTPRequestHandler) in its own way.
    """

    def __init__(self):
        self.requests, self.refusals, self.cuts, self.wrong = [], {}, [], {}
        self.ranges, self.gate, self.in_git, self.hostile = True, lambda: None, set(), {}
        self._commits = {}  # (repo, revision) -> commit
        self._files = {}  # (repo, commit) -> {name: bytes}
        self._blobs = {}  # SHA-256 -> bytes

    def put(self, repo, files, revision="main"):
        """Make a commit for a revision; return its hash."""
        commit = commit_of(f"{repo} {revision} {sorted(files.items())}")
        self._files[repo, commit] = files
        self._commits[repo, commit] = self._commits[repo, revision] = commit
        self._blobs |= {hashlib.sha256(content).hexdigest(): content for content in files.values()}
        return commit

    def count(self, kind):
        return sum(request[0] == kind for request in self.requests)

    def environment(self, folder):
        """Environment variables for child processes that use this server, with a cache in `folder`."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": f"{folder}/hf", "HF_HUB_CACHE": f"{folder}/hub"}
        return own | {"HF_TOKEN": "", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client's acknowledgement

            def do_GET(self):
                hub._answer(self)

            do_HEAD = do_GET

            def handle(self):
                with contextlib.suppress(ConnectionError):  # the client has disconnected
                    super().handle()

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request):
        path = unquote(urlsplit(request.path).path)
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            kind, serve = "list", lambda: self._list(request, listed[1], listed[2])
        elif resolved := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            kind = "head" if request.command == "HEAD" else "resolve"
            serve = functools.partial(self._resolve, request, *resolved.groups())
        elif stored := re.fullmatch(r"/bytes/([0-9a-f]{64})", path):
            kind, serve = "bytes", lambda: self._bytes(request, stored[1])
        else:  # other requests of the package
            kind, serve = "other", lambda: self.send(request, 404, b"")
        self.requests.append((kind, path, request.headers.get("Range"), request.headers.get("Authorization")))
        if refusal := self.refusals.get(kind):
            serve = functools.partial(self.send, request, refusal.status, b"{}", refusal.headers)
        if hostile := self.hostile.get(kind):
            serve = functools.partial(hostile, request)
        serve()

    @staticmethod
    def send(request, status, body, headers=()):
        request.send_response(status)
        for name, value in dict(headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _list(self, request, repo, revision):
        commit = self._commits.get((repo, revision))
        if not commit:
            known = any(repo == other for other, _ in self._commits)
            code = "RevisionNotFound" if known else "RepoNotFound"
            self.send(request, 404, b"{}", {"X-Error-Code": code})
            return
        siblings = []
        for name, content in self._files[repo, commit].items():
            lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
            siblings.append(
                {"rfilename": name, "size": len(content), "blobId": git_hash(content), "lfs": lfs}
            )
            if name in self.in_git:
                del siblings[-1]["lfs"]
        body = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        self.send(request, 200, body, {"Content-Type": "application/json"})

    def _resolve(self, request, repo, commit, name):
        content = self._files.get((repo, commit), {}).get(name)
        if content is None:
            self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        sha256 = hashlib.sha256(content).hexdigest()
        if request.command == "HEAD":
            self.send(request, 200, content, {"ETag": f'"{sha256}"', "X-Repo-Commit": commit})
            return
        # redirects to the bytes, as the Hub does
        self.send(request, 302, b"", {"Location": f"{self.url}/bytes/{sha256}", "X-Repo-Commit": commit})

    def _bytes(self, request, sha256):
        self.gate()
        body = self.wrong.get(sha256, self._blobs[sha256])
        start = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "") if self.ranges else None
        total = len(body)
        body = body[int(start[1]) :] if start else body
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start[1]}-{total - 1}/{total}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if self.cuts:
            body = body[: self.cuts.pop(0)]
            request.close_connection = True
        request.wfile.write(body)
