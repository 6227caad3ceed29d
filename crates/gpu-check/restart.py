"""A server that is killed and started again answers like one that was not: `oscar serve --store` on a GPU.

    python3 crates/gpu-check/restart.py OSCAR [FLAGS OF oscar serve]

One server gets conversations of two turns. Another one, with a page store, gets the first turns, is killed
with SIGKILL and started again, and gets the second turns. All tokens must be equal, and the second turns
must take their prefix from disk. Then the same with host memory: the prefix cache is flushed in between.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

FORMATS = ["oscar", "bf16", "kivi2"]


class Server:
    def __init__(self, flags):
        command = [sys.argv[1], "serve", "--port", "0", "--context", "4096", *sys.argv[2:], *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log = []
        for line in self.process.stdout:
            self.log.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.url = found.group(0)
                break
        else:
            sys.exit("the server did not start:\n" + "".join(self.log))
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/ready").read()
                break
            except OSError:
                time.sleep(0.1)

    def ask(self, prompt):
        body = {"model": "oscar-15m", "prompt": prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request))
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]

    def post(self, path):
        urllib.request.urlopen(urllib.request.Request(self.url + path, b"", method="POST")).read()

    def metric(self, name):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait()


def first(number):
    return "\n".join(f"Line {i} of text {number} says {i * number + 7}." for i in range(90))


def second(number, answer):
    return first(number) + answer + f"\nAnd line {number} again:"


def check(name, wanted, found):
    if wanted != found:
        sys.exit(f"{name}: {found!r} instead of {wanted!r}")


def main():
    for kv in FORMATS:
        flags = ["--kv", kv, "--exact-hits"]
        plain = Server(flags)
        turns = [plain.ask(first(n))[0] for n in (1, 2, 3)]
        wanted = [plain.ask(second(n, turn))[0] for n, turn in zip((1, 2, 3), turns)]
        plain.end()
        with tempfile.TemporaryDirectory() as folder:
            store = [*flags, "--store", folder]
            server = Server(store)
            for n, turn in zip((1, 2, 3), turns):
                check(f"{kv}, first turn", turn, server.ask(first(n))[0])
            time.sleep(1)
            server.end(signal.SIGKILL)
            server = Server(store)
            cached = []
            for n, turn, answer in zip((1, 2, 3), turns, wanted):
                text, details = server.ask(second(n, turn))
                check(f"{kv}, second turn after a restart", answer, text)
                cached.append(details["cached_tokens_by_tier"]["disk"])
            bad = server.metric("oscar_kv_store_corrupt_total")
            server.end()
            if min(cached) < 500 or bad:
                sys.exit(f"{kv}: {cached} tokens from disk, {bad} pages damaged")
        server = Server([*flags, "--store-ram", "1G"])
        for n in (1, 2, 3):
            server.ask(first(n))
        server.post("/flush_cache")
        text, details = server.ask(second(2, turns[1]))
        check(f"{kv}, second turn from host memory", wanted[1], text)
        server.end()
        print(f"{kv}: equal; tokens from disk {cached}, from host memory {details['cached_tokens_by_tier']['ram']}")


main()
