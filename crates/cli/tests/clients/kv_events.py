"""Dynamo's standalone indexer reads the cache events of `oscar serve`. Usage: kv_events.py OSCAR_BINARY map|array

A reader that comes late, one that missed batches, flushes and salts: the indexer counts the pages that the server holds.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

oscar, encoding = sys.argv[1:]
PATIENCE = 60
PAGE = 64


def call(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status < 300, f"{path}: {response.status} {text}"
    return json.loads(text)


def wait_until(what, ready):
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        try:
            if ready():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


def tokens(kind, pages):
    return [(kind * 977 + 31 * i) % 5000 + 100 for i in range(pages * PAGE + 5)]


class Server:
    def __init__(self):
        command = [oscar, "serve", "--port", "0", "--threads", "1", "--context", "2048", "--log", "error",
                   "--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0",
                   "--kv-events-encoding", encoding]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r" on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("the server ended before it served")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.events = call(self.port, "GET", "/server_info")["kv_events"]
        assert self.events["block_size"] == PAGE and self.events["endpoint_host"] == "127.0.0.1", self.events

    def send(self, prompt, **fields):
        body = {"model": "oscar-15m", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return call(self.port, "POST", "/v1/completions", body)


class Indexer:
    def __init__(self, server):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"},
        )
        self.log = []
        threading.Thread(target=lambda: self.log.extend(self.process.stdout), daemon=True).start()
        wait_until("the indexer", lambda: isinstance(call(self.port, "GET", "/workers"), list))
        at = lambda name: f"tcp://127.0.0.1:{server.events[name]}"
        call(self.port, "POST", "/register", {
            "instance_id": 1, "model_name": "m", "block_size": PAGE,
            "endpoint": at("endpoint_port_base"), "replay_endpoint": at("replay_endpoint_port_base")})

    def listen(self, verb):
        call(self.port, "POST", f"/test/{verb}_listener", {"instance_id": 1})

    def held(self, prompt):
        """Tokens of the prompt that the indexer believes to be in the server's cache."""
        scores = call(self.port, "POST", "/query", {"token_ids": prompt, "model_name": "m"})["scores"]
        return scores.get("1", {}).get("0", 0)


def check(server, indexer):
    a, b, c, d = (tokens(kind, pages) for kind, pages in [(1, 7), (2, 5), (3, 6), (4, 4)])
    # Stored before the indexer was there.
    wait_until("the snapshot", lambda: indexer.held(a) == 7 * PAGE)
    # Live.
    server.send(b)
    wait_until("a live batch", lambda: indexer.held(b) == 5 * PAGE)
    assert indexer.held(a[: 3 * PAGE] + c) == 3 * PAGE, "a shared beginning"
    # Missed, and asked for again.
    indexer.listen("pause")
    server.send(c)
    server.send(a[: 2 * PAGE] + d)
    indexer.listen("resume")
    wait_until("what was missed", lambda: indexer.held(a[: 2 * PAGE] + d) == 6 * PAGE)
    assert indexer.held(c) == 6 * PAGE
    # A salted prompt is in the cache and in no event. The next unsalted batch shows that nothing is on its way.
    salted = tokens(5, 6)
    server.send(salted, cache_salt="tenant")
    again = server.send(salted, cache_salt="tenant")["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again >= PAGE, again
    server.send(tokens(6, 3))
    wait_until("the batch after it", lambda: indexer.held(tokens(6, 3)) == 3 * PAGE)
    assert indexer.held(salted) == 0
    # Flushed.
    call(server.port, "POST", "/flush_cache", {})
    wait_until("the flush", lambda: indexer.held(a) == 0)
    assert [indexer.held(prompt) for prompt in (b, c, d)] == [0, 0, 0]
    server.send(b)
    wait_until("a batch after the flush", lambda: indexer.held(b) == 5 * PAGE)


server = Server()
indexer = None
try:
    server.send(tokens(1, 7))
    indexer = Indexer(server)
    check(server, indexer)
except BaseException:
    if indexer:
        print("".join(indexer.log[-60:]), file=sys.stderr)
    raise
finally:
    for process in [server.process] + ([indexer.process] if indexer else []):
        process.kill()
        process.wait()
print("dynamo.indexer is content")
