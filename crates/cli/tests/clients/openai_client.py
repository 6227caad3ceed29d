"""What the official `openai` client sees of `oscar serve`. Usage: openai_client.py BASE_URL API_KEY"""

import sys

import openai

base_url, key = sys.argv[1:]
client = openai.OpenAI(base_url=base_url + "/v1", api_key=key, max_retries=0, timeout=60)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Who are you?"}]
ANSWER = "I am a small language model with fifteen million weights"


def ask(**fields):
    return client.chat.completions.create(**{"model": model, "messages": question, "temperature": 0, **fields})


def refused(kind, status, param, **fields):
    try:
        ask(**fields)
    except kind as error:
        assert error.status_code == status, error
        assert error.param == param, (error.param, param)
        assert error.message, error
        return
    raise AssertionError(f"{fields} should have raised {kind.__name__}")


# Chat.
whole = ask()
text = whole.choices[0].message.content
assert text.startswith(ANSWER), text
assert whole.choices[0].finish_reason == "stop"
assert whole.choices[0].message.role == "assistant"
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert whole.usage.prompt_tokens_details.cached_tokens >= 0

# Stream: the same text, then the usage in a chunk without choices.
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
assert "".join(pieces) == text, pieces
assert len(pieces) > 3, "a stream comes in pieces"
assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
assert all(c.usage is None for c in chunks[:-1])

# Log-probabilities: one entry a token, the greedy choice on top.
entries = ask(logprobs=True, top_logprobs=3, max_tokens=5).choices[0].logprobs.content
assert len(entries) == 5
for entry in entries:
    assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].token == entry.token
assert text.startswith("".join(e.token for e in entries))

# A seed gives the same text again; another seed may not.
draw = dict(
    messages=[{"role": "user", "content": "Continue this text: The sea was calm."}], temperature=1.0, max_tokens=24
)
first, again, other = [ask(**draw, seed=s).choices[0].message.content for s in (7, 7, 8)]
assert first == again, (first, again)
assert first != other, first

# Several choices, each with its own draw.
several = ask(**draw, n=3, seed=7).choices
assert sorted(c.index for c in several) == [0, 1, 2]
assert len({c.message.content for c in several}) > 1
assert several[0].message.content == first, "choice 0 is the answer the seed gives alone"

# Stop strings are not part of the answer; the limit is told.
stopped = ask(stop=["fifteen"]).choices[0]
assert stopped.message.content == text.split("fifteen")[0] and stopped.finish_reason == "stop"
limited = ask(max_completion_tokens=3)
assert limited.choices[0].finish_reason == "length" and limited.usage.completion_tokens == 3

# The older completions route.
raw = client.completions.create(model=model, prompt="The sea", max_tokens=4, temperature=0, echo=True)
assert raw.choices[0].text.startswith("The sea")

# Errors arrive as the client's own types, with the parameter's name.
refused(openai.NotFoundError, 404, "model", model="no-such-model")
refused(openai.BadRequestError, 400, "temperature", temperature=-1)
refused(openai.BadRequestError, 400, "top_p", top_p=2)
refused(openai.BadRequestError, 400, "messages", messages=[])
refused(openai.BadRequestError, 400, "max_tokens", max_tokens=10**7)
try:
    openai.OpenAI(base_url=base_url + "/v1", api_key="wrong", max_retries=0).models.list()
    raise AssertionError("a wrong key should be refused")
except openai.AuthenticationError as error:
    assert error.status_code == 401
print("openai", openai.__version__, "is content")
