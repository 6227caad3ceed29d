"""A long conversation with a server, and questions about its early and late facts at the end.

Usage: turns.py BASE_URL [TURNS] [SEED] [KV_JSON]
Every fifth turn tells a fact, the others a text to read; the server answers each turn. At the end the first and the last
twenty facts are asked for, each behind the same conversation. Prints one JSON object."""

import json
import random
import sys
import time
import urllib.request

base_url = sys.argv[1]
turns = int(sys.argv[2]) if len(sys.argv) > 2 else 200
rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
kv = json.loads(sys.argv[4]) if len(sys.argv) > 4 else None

NAMES = ("Ada Bruno Chloe Dmitri Elena Farid Greta Hugo Ines Jonas Kira Luis Mona Nils Olga Pedro Quinn Rosa Sven Tara "
         "Umar Vera Wanda Ximena Yusuf Zoe Anton Beata Carlos Dora").split()
KINDS = {
    "city": ("lives in", "Where does {} live?", "Lisbon Oslo Cairo Lima Quito Hanoi Perth Turin Kyoto Dakar".split()),
    "job": ("works as a", "What does {} work as?", "baker pilot nurse tailor farmer painter judge chemist".split()),
    "pet": ("has a pet", "Which pet does {} have?", "parrot hamster turtle rabbit pony lizard".split()),
    "code": ("keeps a box with code", "Which code does the box of {} have?", None),
}
NOUNS = "harbour river garden market tower bridge forest village road station".split()
VERBS = "lies waits shines sleeps changes stands".split()
PLACES = "behind the hill,near the old mill,under a grey sky,beside the long wall,above the town".split(",")


def text():
    return " ".join(f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} {rng.choice(PLACES)}." for _ in range(3))


def ask(messages, most):
    body = {"model": "oscar-15m", "messages": messages, "max_tokens": most, "temperature": 0}
    if kv:
        body["kv"] = kv
    request = urllib.request.Request(base_url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request, timeout=900))
    return reply["choices"][0]["message"]["content"], reply["usage"]


def state():
    return json.load(urllib.request.urlopen(base_url + "/internal/state", timeout=60))["stats"]


def settle():
    while state()["view_jobs"]:
        time.sleep(0.2)


messages, facts, memory = [], [], []
pairs = [(name, kind) for name in NAMES for kind in KINDS]
rng.shuffle(pairs)
for turn in range(turns):
    if turn % 5 == 0:
        name, kind = pairs.pop()
        phrase, question, values = KINDS[kind]
        value = rng.choice(values) if values else str(rng.randrange(1000, 10000))
        facts.append((question.format(name), value))
        messages.append({"role": "user", "content": f"My friend {name} {phrase} {value}."})
        answer = f"Noted: {name}, {kind}, {value}."
    else:
        messages.append({"role": "user", "content": "Read this: " + text()})
        answer = "I have read it."
    _, usage = ask(messages, 8)
    # The conversation goes on as the model was trained to answer, whatever it said.
    messages.append({"role": "assistant", "content": answer})
    memory.append(state()["cache_bytes"])
settle()
scores = {"early": [], "late": []}
routes = {}
for part, asked in (("early", facts[:20]), ("late", facts[-20:])):
    for question, value in asked:
        answer, usage = ask(messages + [{"role": "user", "content": question}], 12)
        scores[part].append(value.lower() in answer.lower())
        route = usage.get("kv_details", {}).get("route", "-")
        routes[route] = routes.get(route, 0) + 1
        settle()
stats = state()
print(json.dumps({
    "turns": turns, "tokens": usage["prompt_tokens"], "kv": usage.get("kv_details"),
    "early": sum(scores["early"]) / len(scores["early"]), "late": sum(scores["late"]) / len(scores["late"]), "routes": routes,
    "peak_mib": [round(max(memory[:turns // 2]) / 2**20, 2), round(max(memory[turns // 2:]) / 2**20, 2)],
    "failed": stats["failed"], "compactions": stats["compactions"], "views": stats["views"],
    "probe_tokens": stats["probe_tokens"], "replayed_tokens": stats["replayed_tokens"],
}))
