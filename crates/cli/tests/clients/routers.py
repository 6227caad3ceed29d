"""A router in front of two `oscar serve` replicas. Usage: routers.py ROUTER_MODULE OSCAR_BINARY

Prefix affinity, streaming, and the death of a replica: answers that run on the other one are not touched, and no
request that comes later is lost.
"""

import concurrent.futures
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

module, oscar = sys.argv[1:]
PATIENCE = 60
MODEL = "oscar-15m"

# A router retries a request whose replica does not answer, but cache-aware routing picks the same dead replica again
# until its circuit breaker opens: the breaker must open before the retries are used up. Health checks find a dead
# replica that nobody asks.
ROUTER = [
    "--policy", "cache_aware", "--cache-threshold", "0.3",
    "--retry-max-retries", "5", "--retry-initial-backoff-ms", "50", "--retry-max-backoff-ms", "500",
    "--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "60",
    "--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-check-timeout-secs", "2",
    "--worker-startup-check-interval", "1", "--log-level", "warn",
]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Replica:
    def __init__(self):
        command = [oscar, "serve", "--port", "0", "--threads", "1", "--context", "2048", "--log", "error"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            if found := re.search(r" on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("the replica ended before it served")
        # Nobody reads the rest; without this a full pipe would stop the replica.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def counter(self, name):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        return int(float(re.search(rf"^oscar_{name}(?:{{[^}}]*}})? (\S+)", text, re.M)[1]))


def post(port, body, on_open=None):
    """Status and body; `on_open` hears when the answer has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    begin = response.read1(65536)
    if on_open:
        on_open()
    return response.status, (begin + response.read()).decode()


def chat(text, **fields):
    return {"model": MODEL, "temperature": 0, "max_tokens": 12, "messages": [{"role": "user", "content": text}], **fields}


def story(number):
    return f"Story number {number}: " + f"the harbour of town {number} lay still in the morning. " * 12


def pieces(body):
    data = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert data and data[-1] == "[DONE]", body[-500:]
    return [json.loads(piece) for piece in data[:-1]]


def content(chunks):
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def workers(port):
    """Replicas that the router knows and holds healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/workers")
    listed = json.loads(connection.getresponse().read())["workers"]
    return sum(bool(worker["is_healthy"]) for worker in listed)


def wait_until(what, ready):
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        try:
            if ready():
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


def check(replicas, port):
    finished = lambda: [r.counter("engine_requests_finished_total") for r in replicas]
    wait_until("the router to know both replicas", lambda: workers(port) == 2)

    # All stories at once, so that they are spread by load; then whoever read a story gets all its repetitions and
    # finds it in its cache.
    def tell(number):
        status, body = post(port, chat(story(number)))
        assert status == 200, body
        return json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(cached < 64 for cached in pool.map(tell, range(8)))
    home = {}
    for number in range(8):
        before = finished()
        assert min(tell(number) for _ in range(3)) >= 64, f"story {number} was not in the cache"
        gained = [now - then for now, then in zip(finished(), before)]
        assert sorted(gained) == [0, 3], f"story {number} went to both: {gained}"
        home[number] = gained.index(3)
    print("stories by replica:", home)
    assert set(home.values()) == {0, 1}, "one replica got everything"

    # Streaming: the same chunks as without the router.
    wanted = chat(story(0), stream=True, stream_options={"include_usage": True})
    status, through = post(port, wanted)
    direct = post(replicas[home[0]].port, wanted)[1]
    assert status == 200 and len(pieces(through)) == len(pieces(direct)) > 5
    assert content(pieces(through)) == content(pieces(direct)) != ""
    assert pieces(through)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64

    # Death: long answers run on both replicas; one is killed in the middle.
    dead, alive = 0, 1
    long = {"stream": True, "max_tokens": 700, "ignore_eos": True}
    results, begun = {}, threading.Semaphore(0)
    running = [[n for n in home if home[n] == r][:2] for r in (dead, alive)]

    def run(number):
        try:
            results[number] = post(port, chat(story(number), **long), begun.release)
        except (OSError, http.client.HTTPException) as error:
            results[number] = (0, str(error))

    threads = [threading.Thread(target=run, args=[number]) for number in sum(running, [])]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=PATIENCE)
    assert len(results) < len(threads), "an answer ended before the kill: make them longer"
    replicas[dead].process.send_signal(signal.SIGKILL)
    replicas[dead].process.wait()
    # Every story is asked for at once, those of the dead replica first.
    for number in sorted(home, key=lambda n: home[n] != dead):
        status, body = post(port, chat(story(number)))
        assert status == 200, f"story {number} of replica {home[number]} was lost: {status} {body}"
    for thread in threads:
        thread.join(PATIENCE)
    for number in running[alive]:
        status, body = results[number]
        last = [c for c in pieces(body) if c["choices"]][-1]
        assert status == 200 and last["choices"][0]["finish_reason"] == "length", body[-500:]


replicas = [Replica(), Replica()]
port = free_port()
urls = [f"http://127.0.0.1:{r.port}" for r in replicas]
router = subprocess.Popen(
    [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
     "--worker-urls", *urls, *ROUTER],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
)
log = []
threading.Thread(target=lambda: log.extend(router.stdout), daemon=True).start()
try:
    check(replicas, port)
except BaseException:
    print("".join(log[-60:]), file=sys.stderr)
    raise
finally:
    for process in [router, *(r.process for r in replicas)]:
        process.kill()
        process.wait()
print(f"{module} is content")
