"""Two agent front ends, unchanged, against `oscar serve`: Codex (Responses) and Claude Code (Messages).

Usage: agents.py OSCAR_BINARY FOLDER. FOLDER keeps the packages of npm between runs. A front end that cannot be installed is
named and left out; with CI set that is a failure. Server and front ends run in a network namespace without any way out,
where the kernel allows it.

The embedded model is no agent: what is shown is that prompts of that size, tools, streams and ends are accepted by both
sides, and that a second turn finds the first one's prompt in the cache.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request

oscar, folder = sys.argv[1], pathlib.Path(sys.argv[2])
PACKAGES = ["@openai/codex", "@anthropic-ai/claude-code"]


def missing(why):
    if os.environ.get("CI"):
        sys.exit(why)
    print(f"NOT TESTED: {why}", file=sys.stderr)


def install():
    if not shutil.which("npm"):
        return missing("npm is not installed")
    done = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *PACKAGES],
                          capture_output=True, text=True, timeout=900)
    if done.returncode:
        missing(f"npm cannot install {PACKAGES}: {done.stderr[-500:]}")


def isolated():
    """Starts this script again where only the loopback is."""
    if os.environ.get("OSCAR_AGENTS_ISOLATED"):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
        return
    os.environ["OSCAR_AGENTS_ISOLATED"] = "1"
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
    print("no network namespaces here: the front ends run with the network they have", file=sys.stderr)


def metric(name):
    text = urllib.request.urlopen(base + "/metrics", timeout=60).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def accepted(done):
    """Whether the front end got its answer. One that runs into its limit is an error to Claude Code, but an answer."""
    return done.returncode == 0 or "output token maximum" in done.stdout


def drive(name, command, settings):
    """One question, twice: the second prompt must be found in the cache."""
    path = folder / "node_modules/.bin" / command[0]
    if not path.exists():
        return missing(f"{name} is not installed")
    found = []
    for _ in range(2):
        before = metric("oscar_prefix_cache_hits_total")
        with tempfile.TemporaryDirectory() as home:
            environment = {"PATH": os.environ["PATH"], "HOME": home, "CODEX_HOME": home, **settings}
            done = subprocess.run([path, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env=environment, cwd=home, timeout=900)
        assert accepted(done), f"{name}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        found.append(metric("oscar_prefix_cache_hits_total") - before)
    print(f"{name}: {found[1]:.0f} tokens of the second prompt came from the cache")
    assert found[1] > 500, found


if not os.environ.get("OSCAR_AGENTS_ISOLATED"):
    install()
isolated()
server = subprocess.Popen([oscar, "serve", "--port", "0", "--precision", "fast", "--log", "error"],
                          stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
try:
    for line in server.stderr:
        if found := re.search(r" on (http://127\.0\.0\.1:\d+)", line):
            base = found[1]
            break
    else:
        raise AssertionError("the server ended before it served")
    threading.Thread(target=server.stderr.read, daemon=True).start()
    provider = f'model_providers.oscar={{name="oscar",base_url="{base}/v1",wire_api="responses",env_key="OSCAR_KEY"}}'
    drive("Codex", ["codex", "exec", "--skip-git-repo-check", "--json", "-s", "read-only", "-c", provider,
                    "-c", "model_provider=oscar", "-m", "oscar-15m", "Who are you?"],
          {"OSCAR_KEY": "none"})
    # Its own system prompt and all its tools have 30 thousand tokens of this model.
    drive("Claude Code", ["claude", "-p", "Who are you?", "--output-format", "json", "--tools", "Read,Edit,Bash",
                          "--system-prompt", "You are a coding agent. Answer briefly."],
          {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "oscar-15m",
           "ANTHROPIC_SMALL_FAST_MODEL": "oscar-15m", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
           "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"})
    print("every front end that is here is content")
finally:
    server.terminate()
    server.wait(60)
