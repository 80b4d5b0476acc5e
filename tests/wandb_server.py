"""Stand in for wandb's server on this machine, so that tests run the real wandb package without a network."""

import gzip
import json
import os
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    """Hide the keys and settings of whoever runs the tests; afterwards stop wandb's service."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, folder in {"HOME": "", "WANDB_CONFIG_DIR": "config", "WANDB_CACHE_DIR": "cache"}.items():
        monkeypatch.setenv(name, str(tmp_path / "home" / folder))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    with suppress(ConnectionError):  # a test has killed it
        wandb.teardown()
    wandb.run = None  # one that did not finish would keep the next from logging in
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture
def wandb_server(no_key, monkeypatch):
    """Start a stand-in for wandb's server, for which the real package has a key."""
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    yield server
    server.close()


class WandbServer(ThreadingHTTPServer):
    """Keeps runs: {id: {"rows": [...], "config": {...}}}. While `status` is not 200 it answers that, 0: nothing."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs, self.status, self.closed = {}, 200, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.status = 500
        self.closed.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Print nothing: wandb resets connections when it ends."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if not self.server.status:
            self.server.closed.wait(60)
        value = {}
        if self.server.status == 200 and self.path == "/graphql":
            value = {"data": self.graphql(json.loads(body))}
        elif self.server.status == 200 and self.path.endswith("/file_stream"):
            run = self.server.runs[self.path.split("/")[-2]]
            if rows := (json.loads(body).get("files") or {}).get("wandb-history.jsonl"):
                run["rows"][rows["offset"] :] = map(json.loads, rows["content"])
        out = json.dumps(value).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    do_GET = do_PUT = do_POST

    def graphql(self, request):
        """Answer what a run needs to start and to go on."""
        operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
        variables = request.get("variables") or {}
        runs, name = self.server.runs, variables.get("name")
        if operation == "RunResumeStatus":
            bucket = describe_run(name, runs[name]) if name in runs else None
            return {"model": PROJECT | {"bucket": bucket}}
        if operation == "UpsertBucket":
            run = runs.setdefault(name, {"rows": [], "config": {}})
            run |= {key: variables[key] for key in ("groupName", "displayName", "tags") if variables.get(key)}
            run["config"] |= json.loads(variables.get("config") or "{}")
            return {"upsertBucket": {"bucket": describe_run(name, run), "inserted": not run["rows"]}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.server.url}/up/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "i", "uploadHeaders": [], "files": files}}
        return {}

    def log_message(self, *args):
        """Print nothing."""


PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}


def describe_run(name, run):
    """Return a run as wandb asks for it."""
    texts = dict.fromkeys(("config", "summaryMetrics"), "{}") | dict.fromkeys(("eventsTail", "historyTail"), "[]")
    texts |= {"id": "i", "name": name, "displayName": "d", "wandbConfig": '{"t": 1}'}
    return texts | {"project": PROJECT, "historyLineCount": len(run["rows"]), "eventsLineCount": 0, "logLineCount": 0}
