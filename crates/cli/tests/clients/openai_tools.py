"""Tools, structured output and the Responses API with the official `openai` client.

Usage: openai_tools.py BASE_URL API_KEY. The embedded model knows no tools: calls are forced.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

base_url, key = sys.argv[1:]
client = openai.OpenAI(base_url=base_url + "/v1", api_key=key, max_retries=0, timeout=120)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the weather in Bern?"}]
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
weather = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
clock = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def ask(**fields):
    fields = {"messages": question, "temperature": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(model=model, **fields)


def check(call):
    assert call.type == "function" and call.id, call
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert len(arguments["city"]) <= 12 and 1 <= arguments["days"] <= 9, arguments
    else:
        assert call.function.name == "now", call
    return call


# A named tool and any tool, whole.
named = {"type": "function", "function": {"name": "get_weather"}}
whole = ask(tools=[weather, clock], tool_choice=named).choices[0]
assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
(call,) = whole.message.tool_calls
assert check(call).function.name == "get_weather"
single = ask(tools=[weather, clock], tool_choice="required", parallel_tool_calls=False).choices[0]
assert len(single.message.tool_calls) == 1 and check(single.message.tool_calls[0])

# The same in a stream: name first, arguments in pieces.
name, arguments, pieces, reason = None, "", 0, None
for chunk in ask(tools=[weather, clock], tool_choice=named, stream=True):
    choice = chunk.choices[0]
    reason = choice.finish_reason or reason
    for delta in choice.delta.tool_calls or []:
        assert delta.index == 0
        name = name or delta.function.name
        arguments += delta.function.arguments or ""
        pieces += 1
assert (name, arguments, reason) == ("get_weather", call.function.arguments, "tool_calls"), (name, arguments, reason)
assert pieces > 3, "arguments come in pieces"
with client.chat.completions.stream(model=model, messages=question, temperature=0, tools=[weather], tool_choice=named) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion().choices[0]
assert final.message.tool_calls[0].function.arguments == arguments

# The result goes back; the model answers with text.
history = question + [
    {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
    {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
]
after = ask(messages=history, tools=[weather], tool_choice="none").choices[0]
assert after.finish_reason in ("stop", "length") and not after.message.tool_calls, after


# parse() with a schema, and vLLM's fields.
class Report(BaseModel):
    kind: Literal["rain", "sun"]
    degrees: int
    tags: list[Literal["wet", "dry"]]


parsed = client.chat.completions.parse(
    model=model, messages=question, temperature=0, max_tokens=200, response_format=Report
).choices[0]
assert parsed.finish_reason == "stop", parsed
assert isinstance(parsed.message.parsed, Report), parsed
free = ask(response_format={"type": "json_object"}, max_tokens=400).choices[0]
assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict), free
for several in ask(extra_body={"guided_choice": ["yes", "no"]}, n=3, temperature=1.0, seed=1).choices:
    assert several.message.content in ("yes", "no"), several
assert ask(extra_body={"guided_regex": "[0-9]{3}"}).choices[0].message.content.isdigit()
grammar = 'root ::= "It is " ("wet" | "dry") "."'
assert ask(extra_body={"grammar": grammar}, logprobs=True).choices[0].message.content in ("It is wet.", "It is dry.")
for field, value, word in [
    ("guided_json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("allowed_token_ids", [1], "allowed_token_ids"),
    ("functions", [{"name": "f"}], "tools"),
]:
    try:
        ask(extra_body={field: value})
        raise AssertionError(f"{field} should be refused")
    except openai.BadRequestError as error:
        assert error.param == field and word in error.message, error

# Responses.
function = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}
response = client.responses.create(
    model=model, input="Weather?", instructions="Be brief.", temperature=0, max_output_tokens=200,
    tools=[function], tool_choice={"type": "function", "name": "get_weather"},
)
assert response.status == "completed", response
(item,) = response.output
assert item.type == "function_call" and 1 <= json.loads(item.arguments)["days"] <= 9, item
follow_up = client.responses.create(
    model=model, temperature=0, max_output_tokens=40,
    input=[{"role": "user", "content": "Weather?"}, item.model_dump(),
           {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}],
)
assert follow_up.output_text and follow_up.usage.input_tokens_details.cached_tokens >= 0
with client.responses.stream(model=model, input="Who are you?", temperature=0) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text and text.startswith("I am"), text
structured = client.responses.parse(
    model=model, input="Weather?", temperature=0, max_output_tokens=200, text_format=Report
)
assert isinstance(structured.output_parsed, Report), structured
try:
    client.responses.create(model=model, input="x", previous_response_id="resp_1")
    raise AssertionError("no response is kept")
except openai.BadRequestError as error:
    assert error.param == "previous_response_id", error
print("openai", openai.__version__, "with tools is content")
