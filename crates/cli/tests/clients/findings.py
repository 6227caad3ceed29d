"""What each high and medium finding of the security test does to a server. One line of JSON each.

    python3 findings.py target/release/oscar [h1 m3 ...]

It needs Linux, 6 GiB of free memory and five minutes. It reports and judges nothing, so that it can be run
with a binary from before a fix too. The tests that fail are listed in docs/operating.md.
"""

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

BINARY = sys.argv[1]
MIB = 1 << 20


class Server:
    """A server that is up, or has ended."""

    def __init__(self, *flags, env=None, stderr=subprocess.DEVNULL, most_memory=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        limit = (lambda: resource.setrlimit(resource.RLIMIT_AS, (most_memory,) * 2)) if most_memory else None
        command = [BINARY, "serve", f"--port={self.port}", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, **(env or {})}, preexec_fn=limit
        )
        while self.ask("GET", "/health", timeout=2)[0] != 200 and self.process.poll() is None:
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ask(self, method, path, body=None, headers=None, timeout=120):
        """Status and body of the answer, or the name of the error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError) as error:
            return type(error).__name__, b""
        finally:
            connection.close()

    def complete(self, prompt, headers=None, **fields):
        return self.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields}, headers)

    def connect(self, *parts):
        """A connection on which these bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(20)
        for part in parts:
            connection.sendall(part)
        return connection

    def memory(self):
        """Resident memory in MiB."""
        status = open(f"/proc/{self.process.pid}/status").read()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024

    def threads(self):
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


def head(length):
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def seconds_of(run):
    begun = time.time()
    return run(), round(time.time() - begun, 3)


def h1():
    """29 KB that ask for 5000 x 128 x 21 log-probabilities."""
    with Server("--context=8192", "--kv-memory=256M", most_memory=5 << 30) as server:
        ids = [100 + i % 900 for i in range(5000)]
        ask = lambda: server.complete(ids, max_tokens=0, prompt_logprobs=20, n=128)
        answer, seconds = seconds_of(ask)
        time.sleep(0.5)
        return {"answer": answer[0], "seconds": seconds, "exit": server.process.poll()}


def h2():
    """A prompt that cannot fit is tokenized."""
    with Server() as server:
        before, peak, done = server.memory(), [0], threading.Event()

        def watch():
            while not done.wait(0.01):
                peak[0] = max(peak[0], server.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer, seconds = seconds_of(lambda: server.complete("7" * (4 * MIB)))
        done.set()
        watcher.join()
        return {"answer": answer[0], "seconds": seconds, "mib_before": before, "mib_peak": peak[0]}


def h3():
    """Clients leave, and their work goes on beside new work."""
    with Server() as server:
        before = most = server.threads()
        body = json.dumps({"prompt": "7 " * 400_000, "max_tokens": 1}).encode()
        for _ in range(12):
            connection = server.connect(head(len(body)), body)
            time.sleep(0.12)
            connection.close()
            most = max(most, server.threads())
        return {"threads_before": before, "threads_most": most}


def h4():
    """The reader of the log goes away."""
    reader, writer = os.pipe()
    with Server(stderr=writer) as server:
        os.close(writer)
        os.close(reader)
        answers = [server.complete("a")[0] for _ in range(3)]
        health = server.ask("GET", "/health")[0]
        server.process.send_signal(signal.SIGTERM)
        return {"answers": answers, "health": health, "exit": server.process.wait(timeout=60)}


def m1():
    """A page of another origin uses the server of whoever reads it."""
    with Server() as server:
        foreign = {"Origin": "https://evil.example"}
        return {
            "plain_text": server.complete("a", {**foreign, "Content-Type": "text/plain"})[0],
            "foreign_origin": server.complete("a", foreign)[0],
            "foreign_host": server.ask("GET", "/internal/state", None, {"Host": "attacker.example"})[0],
        }


def m2():
    """A server is public and has no key."""
    found = {}
    for name, flags, env in (
        ("public_without_key", ["--host=0.0.0.0"], {}),
        ("empty_key_list", [], {"OSCAR_API_KEYS": " , ,"}),
    ):
        with Server(*flags, env=env) as server:
            found[name] = "serves" if server.process.poll() is None else "refuses"
    return found


def m3():
    """Connections that say nothing, or half of a head."""
    with Server() as server:
        connections = [server.connect(b"GET /health HTTP/1.1\r\nX-A: " if i % 2 else b"") for i in range(200)]
        time.sleep(135)
        still_open = 0
        for connection in connections:
            connection.settimeout(0.2)
            try:
                still_open += bool(connection.recv(1))
            except TimeoutError:
                still_open += 1
            except OSError:
                pass
        return {"connections": len(connections), "open_after_135_s": still_open}


def m4():
    """A tenant asks what another one has sent, and throws it away."""
    keys = {name: f"key-of-tenant-{name}-0123456789" for name in "ab"}
    bearer = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    env = {"OSCAR_API_KEYS": ",".join(keys.values())}
    flags = ["--isolate-keys"] if "--isolate-keys" in subprocess.getoutput(f"{BINARY} serve --help") else []
    with Server(*flags, env=env) as server:
        secret = " ".join(f"secret{i}" for i in range(200))
        server.complete(secret, bearer["a"])
        usage = json.loads(server.complete(secret, bearer["b"])[1])["usage"]
        flushed = server.ask("POST", "/flush_cache", {}, bearer["b"])[0]
        return {"cached_for_b": usage["prompt_tokens_details"]["cached_tokens"], "flush_by_b": flushed}


def m5():
    """Forty bodies of 31 MiB whose last byte never comes."""
    with Server("--max-body-bytes=33554432") as server:
        before, connections = server.memory(), []
        body = b'{"prompt":"' + b"7" * (31 * MIB - 12)
        for _ in range(40):
            try:
                connections.append(server.connect(head(31 * MIB), body))
            except OSError:
                pass  # Refused before all of it was sent.
        time.sleep(1)
        return {"mib_before": before, "mib_with_40_bodies": server.memory()}


for finding in (h1, h2, h3, h4, m1, m2, m3, m4, m5):
    if not sys.argv[2:] or finding.__name__ in sys.argv[2:]:
        print(json.dumps({"finding": finding.__name__.upper(), **finding()}), flush=True)
