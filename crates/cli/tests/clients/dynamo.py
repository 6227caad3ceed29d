"""NVIDIA Dynamo's front end with KV routing over two `oscar serve --dynamo` replicas. Usage: dynamo.py OSCAR_BINARY MODEL_FOLDER

Discovery by files, no etcd and no NATS. A request lands where its prefix is, a client that hangs up stops the engine, the
stream of a killed replica goes on on the other, a replica that ends leaves the fleet first. Then a fleet of one replica that
computes prompts and one that continues them (Dynamo's disaggregated mode): answers are those of one machine.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

oscar, folder = sys.argv[1:]
PATIENCE = 120
home = tempfile.TemporaryDirectory(prefix="oscar-dynamo-")
ENVIRONMENT = {
    **os.environ,
    "HOME": home.name,
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_FILE_KV": os.path.join(home.name, "discovery"),
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_LOG": "warn",
    "HF_HUB_OFFLINE": "1",
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, f"{path}: {response.status} {text}"
    return json.loads(text)


def wait_until(what, ready):
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        try:
            if ready():
                return
        except (OSError, http.client.HTTPException, AssertionError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


class Process:
    """A child whose output is kept, for the message of a failure."""

    def __init__(self, command, **variables):
        self.log = []
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**ENVIRONMENT, **variables},
        )
        threading.Thread(target=lambda: self.log.extend(self.process.stdout), daemon=True).start()

    def end(self):
        self.process.kill()
        self.process.wait()


class Replica(Process):
    def __init__(self, *flags, **variables):
        super().__init__([oscar, "serve", "--model", folder, "--port", "0", "--threads", "1", "--context", "2048",
                          "--log", "error", "--calibrate", "no", "--dynamo", "--dynamo-python", sys.executable, *flags],
                         **variables)
        self.port = self.said(r" on http://127\.0\.0\.1:(\d+)")

    def said(self, pattern):
        """The port that it printed."""
        find = lambda: re.search(pattern, "".join(self.log))
        wait_until(pattern, find)
        return int(find()[1])

    def counter(self, name):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        return int(float(re.search(rf"^oscar_{name}(?:{{[^}}]*}})? (\S+)", text, re.M)[1]))


def story(number):
    return f"Story number {number}: " + f"the harbour of town {number} lay still in the morning. " * 25


def chat(model, text, **fields):
    return {"model": model, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": text}], **fields}


class Stream:
    """A streamed answer, read piece by piece."""

    def __init__(self, port, body):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        self.connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def pieces(self):
        for line in self.response:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])


def check(replicas, port):
    listed = lambda: [model["id"] for model in call(port, "GET", "/v1/models")["data"]]
    wait_until("the model in the front end", listed)
    model = listed()[0]
    instances = os.path.join(ENVIRONMENT["DYN_FILE_KV"], "v1", "instances")
    registered = lambda: {i for _, _, files in os.walk(instances) for i in files}
    wait_until("both replicas to be registered", lambda: len(registered()) >= 2)

    # Answers are those of the engine.
    direct = call(replicas[0].port, "POST", "/v1/chat/completions", chat(model, "Who are you?", max_tokens=24))
    through = call(port, "POST", "/v1/chat/completions", chat(model, "Who are you?", max_tokens=24))
    texts = [answer["choices"][0]["message"]["content"] for answer in (direct, through)]
    assert texts[0] == texts[1] != "", texts

    # A prompt that one replica has read, without the front end, is sent there: only its events can tell.
    for number in range(4):
        home_of_it = number % 2
        call(replicas[home_of_it].port, "POST", "/v1/chat/completions", chat(model, story(number)))
        time.sleep(2)  # the events reach the router
        before = [replica.counter("prefix_cache_hits_total") for replica in replicas]
        ended = [replica.counter("engine_requests_finished_total") for replica in replicas]
        call(port, "POST", "/v1/chat/completions", chat(model, story(number)))
        after = [replica.counter("prefix_cache_hits_total") for replica in replicas]
        gained = [now - then for now, then in zip(after, before)]
        done = [replica.counter("engine_requests_finished_total") - then for replica, then in zip(replicas, ended)]
        assert done[home_of_it] == 1 and sum(done) == 1, f"story {number}: {done}"
        assert gained[home_of_it] >= 192, f"story {number}: {gained}"
    print("requests land where their prefix is")

    # A client that hangs up.
    long = {"max_tokens": 1200, "ignore_eos": True}
    cancelled = lambda: sum(replica.counter("engine_requests_cancelled_total") for replica in replicas)
    before = cancelled()
    stream = Stream(port, chat(model, story(0), **long))
    next(stream.pieces())
    stream.connection.sock.close()
    stream.response.close()
    wait_until("the engine to hear of it", lambda: cancelled() > before)
    print("cancellation reaches the engine")

    # A replica is killed in the middle of an answer.
    running = lambda: [replica.counter("num_requests_running") for replica in replicas]
    wait_until("idle replicas", lambda: sum(running()) == 0)
    stream = Stream(port, chat(model, story(1), **{**long, "max_tokens": 600}))
    pieces = stream.pieces()
    seen = [next(pieces) for _ in range(10)]
    dead = running().index(1)
    replicas[dead].end()
    seen.extend(pieces)
    finish = [piece["choices"][0]["finish_reason"] for piece in seen if piece.get("choices")][-1]
    usage = [piece["usage"] for piece in seen if piece.get("usage")][-1]
    assert finish == "length" and usage["completion_tokens"] == 600, (finish, usage)
    assert replicas[1 - dead].counter("engine_requests_finished_total") > 0
    print("the stream of a killed replica goes on on the other")

    # SIGTERM: out of the fleet first, then the end.
    alive = replicas[1 - dead]
    known = registered()
    alive.process.send_signal(signal.SIGTERM)
    assert alive.process.wait(PATIENCE) == 0, "".join(alive.log[-20:])
    assert len(registered()) < len(known), registered()
    print("a replica that ends leaves the fleet")


def check_split(prefill, decode, port):
    listed = lambda: [model["id"] for model in call(port, "GET", "/v1/models")["data"]]
    wait_until("the model in the front end", listed)
    model = listed()[0]
    # The front end may hear of the model before it hears of the replica that computes prompts.
    numbers = iter(range(100, 1000))
    split = lambda: call(port, "POST", "/v1/chat/completions", chat(model, story(next(numbers)))) and \
        prefill.counter("kv_transfer_tickets_total") > 0
    wait_until("a prompt to be computed by the first replica", split)
    for number, fields in [(10, {}), (11, {"temperature": 1.0, "seed": 7})]:
        fetched, computed = decode.counter("kv_transfer_fetched_pages_total"), prefill.counter("prompt_tokens_total")
        through = call(port, "POST", "/v1/chat/completions", chat(model, story(number), max_tokens=24, **fields))
        assert prefill.counter("prompt_tokens_total") > computed + 200, "the prompt was computed there"
        assert decode.counter("kv_transfer_fetched_pages_total") > fetched, "and fetched from there"
        alone = call(prefill.port, "POST", "/v1/chat/completions", chat(model, story(number), max_tokens=24, **fields))
        texts = [answer["choices"][0]["message"]["content"] for answer in (through, alone)]
        assert texts[0] == texts[1] != "", texts
    assert decode.counter("kv_transfer_fallbacks_total") == 0
    print("a prompt of one replica continues on another")


def frontend(port, **variables):
    return Process([sys.executable, "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1",
                    "--http-port", str(port), "--migration-limit", "2"], **variables)


processes = []
try:
    for _ in range(2):
        processes.append(Replica())
    replicas = processes[:]
    port = free_port()
    processes.append(frontend(port))
    check(replicas, port)
    while processes:
        processes.pop().end()

    fleet = {"DYN_FILE_KV": os.path.join(home.name, "split")}
    processes.append(Replica("--kv-transfer-listen", "127.0.0.1:0", DYN_DISAGGREGATION_MODE="prefill", **fleet))
    pages = processes[0].said(r"pages for other machines: 127\.0\.0\.1:(\d+)")
    processes.append(Replica("--kv-transfer-peer", f"127.0.0.1:{pages}", DYN_DISAGGREGATION_MODE="decode", **fleet))
    port = free_port()
    processes.append(frontend(port, **fleet))
    check_split(*processes[:2], port)
except BaseException:
    for process in processes:
        print("".join(process.log[-40:]), file=sys.stderr)
    raise
finally:
    for process in processes:
        process.end()
    home.cleanup()
print("dynamo is content")
