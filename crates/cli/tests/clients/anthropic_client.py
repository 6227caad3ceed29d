"""What the official `anthropic` client sees of `oscar serve`. Usage: anthropic_client.py BASE_URL API_KEY"""

import sys

import anthropic

base_url, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0, timeout=120)
model = "oscar-15m"
question = [{"role": "user", "content": "Who are you?"}]
ANSWER = "I am a small language model with fifteen million weights"


# Newer clients have no argument for the temperature.
greedy = {"extra_body": {"temperature": 0}}


def ask(**fields):
    return client.messages.create(**{"model": model, "messages": question, "max_tokens": 200, **greedy, **fields})


# Text, whole and streamed. More tokens than the context has room for are cut.
whole = ask(max_tokens=10**6)
(block,) = whole.content
assert block.type == "text" and block.text.startswith(ANSWER), whole
assert whole.stop_reason == "end_turn" and whole.role == "assistant"
with client.messages.stream(model=model, messages=question, max_tokens=200, **greedy) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == block.text and final.usage.output_tokens == whole.usage.output_tokens, (text, final)
assert final.stop_reason == "end_turn"
stopped = ask(stop_sequences=["fifteen"])
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "fifteen", stopped
assert ask(max_tokens=3).stop_reason == "max_tokens"

# Tokens: counted beforehand, and cached ones apart from the others.
long = [{"role": "user", "content": "The harbour lay still in the morning. " * 20}]
counted = client.messages.count_tokens(model=model, messages=long).input_tokens
for read in (False, True):
    usage = ask(messages=long, max_tokens=2).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted, (usage, counted)
    assert (usage.cache_read_input_tokens >= 64) == read, usage

# A header that changes with every request, as Claude Code's does, does not spoil the prefix cache.
system = "Answer briefly and stay calm. " * 20
for read, header in ((False, "cch=1"), (True, "cch=2")):
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: {header};"}, {"type": "text", "text": system}]
    usage = ask(system=blocks, max_tokens=2).usage
    assert (usage.cache_read_input_tokens >= 64) == read, usage

# Tools: the embedded model knows none, so the call is forced.
tool = {
    "name": "get_weather",
    "description": "Tells the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}}
called = ask(**forced)
(use,) = called.content
assert called.stop_reason == "tool_use" and use.type == "tool_use" and use.name == "get_weather", called
assert 1 <= use.input["days"] <= 9, use
with client.messages.stream(model=model, messages=question, max_tokens=200, **greedy, **forced) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_message()
assert streamed.content[0].input == use.input, streamed
assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "input_json" in kinds, kinds
result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
history = question + [
    {"role": "assistant", "content": [use.model_dump()]},
    {"role": "user", "content": [result]},
]
assert ask(messages=history, tools=[tool], tool_choice={"type": "none"}, max_tokens=20).content[0].type == "text"

# Errors arrive as the client's own types, none of which it would try again.
for kind, fields in [
    (anthropic.NotFoundError, {"model": "claude-opus"}),
    (anthropic.BadRequestError, {"extra_body": {"temperature": -1}}),
    (anthropic.BadRequestError, {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
]:
    try:
        ask(**fields)
        raise AssertionError(f"{fields} should have raised {kind.__name__}")
    except kind as error:
        assert error.body["type"] == "error" and error.body["error"]["message"], error
print("anthropic", anthropic.__version__, "is content")
