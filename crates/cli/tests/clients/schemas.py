"""Generated JSON Schemas: every answer that is complete validates with an independent validator.

Usage: schemas.py BASE_URL API_KEY COUNT [SEED]. Schemas have nested objects, arrays, enums, numbers with bounds,
patterns, references and unions. Answers are sampled at temperature 1, so that the model wanders through the schema.
"""

import concurrent.futures
import json
import random
import sys
import urllib.error
import urllib.request

import jsonschema

base_url, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
WORDS = ["city", "days", "kind", "name", "size", "tags", "unit", "when", "color", "count"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]{1,6}$", "^[0-9]{3}-[0-9]{2}$", "^(north|south)-[0-9]$"]


def leaf(draw, names):
    kind = draw.randrange(9 if names else 8)
    low = draw.randint(-50, 50)
    if kind == 0:
        return {"type": "string", "maxLength": draw.randint(1, 12)}
    if kind == 1:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == 2:
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)}
    if kind == 3:
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 9)}
    if kind == 4:
        return {"enum": draw.sample(["red", "green", 3, -7, True, None, "ü"], draw.randint(1, 4))}
    if kind == 5:
        return {"const": draw.choice(["fixed", 42, False])}
    if kind == 6:
        return {"type": "boolean"}
    if kind == 7:
        return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}
    return {"$ref": "#/$defs/" + draw.choice(names)}


def schema(draw, depth, names):
    kind = draw.randrange(10) if depth > 0 else 9
    if kind < 4:
        chosen = draw.sample(WORDS, draw.randint(1, 4))
        properties = {name: schema(draw, depth - 1, names) for name in chosen}
        required = draw.sample(chosen, draw.randint(0, len(chosen)))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind < 6:
        low = draw.randint(0, 2)
        bounds = {"minItems": low, "maxItems": low + draw.randint(0, 2)}
        return {"type": "array", "items": schema(draw, depth - 1, names), **bounds}
    if kind == 6:
        return {"anyOf": [schema(draw, depth - 1, names) for _ in range(draw.randint(2, 3))]}
    return leaf(draw, names)


def generated(number):
    draw = random.Random(1000 * seed + number)
    names = draw.sample(["A", "B"], draw.randint(0, 2))
    definitions = {name: schema(draw, 1, []) for name in names}
    whole = schema(draw, 3, names)
    if draw.random() < 0.8 and whole.get("type") != "object":
        whole = {"type": "object", "properties": {"value": whole}, "required": ["value"], "additionalProperties": False}
    return {**whole, "$defs": definitions} if definitions else whole


def ask(number):
    """The schema and what came of it: complete, cut off, or refused."""
    wanted = generated(number)
    body = {
        "messages": [{"role": "user", "content": "Answer."}], "temperature": 1.0, "seed": number, "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted, "strict": True}},
    }
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    request = urllib.request.Request(base_url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{json.dumps(wanted)} is refused: {error.read().decode()}") from None
    content = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return "cut off"
    jsonschema.Draft202012Validator.check_schema(wanted)
    try:
        jsonschema.validate(json.loads(content), wanted, cls=jsonschema.Draft202012Validator)
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        raise AssertionError(f"{content!r} does not fit {json.dumps(wanted)}: {error}") from None
    return "complete"


with concurrent.futures.ThreadPoolExecutor(8) as pool:
    outcomes = list(pool.map(ask, range(count)))
complete = outcomes.count("complete")
assert complete >= count * 0.9, f"only {complete} of {count} answers are complete"
print(f"{complete} of {count} answers are complete, all of them valid; jsonschema is content")
