"""Agent frameworks as they are: litellm, langchain-openai and instructor, whole and streamed.

Usage: frameworks.py BASE_URL API_KEY. The embedded model knows no tools: calls are forced.
"""

import json
import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download
os.environ["LANGSMITH_TRACING"] = "false"

import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

base_url, key = sys.argv[1:]
url, model = base_url + "/v1", "oscar-15m"
WHO = "Who are you?"
ANSWER = "I am a small language model with fifteen million weights"


class Report(BaseModel):
    """The weather in one place."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["rain", "sun"]
    degrees: int = Field(ge=-40, le=50)
    tags: list[Literal["wet", "dry"]] = Field(max_length=3)


class get_weather(BaseModel):
    """Look the weather up."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=9)


def check_call(name, arguments):
    assert name == "get_weather", name
    get_weather.model_validate(arguments)


# --- litellm -------------------------------------------------------------------------------------
def ask(**fields):
    fields = {"messages": [{"role": "user", "content": WHO}], "temperature": 0, "max_tokens": 200, **fields}
    return litellm.completion(model="openai/" + model, api_base=url, api_key=key, num_retries=0, **fields)


text = ask().choices[0].message.content
assert text.startswith(ANSWER), text
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
assert streamed == text, streamed
tool = {"type": "function", "function": {"name": "get_weather", "parameters": get_weather.model_json_schema()}}
forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
(call,) = ask(**forced).choices[0].message.tool_calls
check_call(call.function.name, json.loads(call.function.arguments))
chunks = list(ask(stream=True, **forced))
built = litellm.stream_chunk_builder(chunks)
(again,) = built.choices[0].message.tool_calls
assert again.function.arguments == call.function.arguments, again
structured = ask(response_format=Report).choices[0].message.content
Report.model_validate_json(structured)
try:
    ask(temperature=-1)
    raise AssertionError("a bad temperature should be refused")
except litellm.BadRequestError as error:
    assert "temperature" in str(error), error

# --- langchain-openai ----------------------------------------------------------------------------
chat = ChatOpenAI(model=model, base_url=url, api_key=key, temperature=0, max_retries=0, max_tokens=200)
assert chat.invoke(WHO).content == text
pieces = [chunk.content for chunk in chat.stream(WHO)]
assert "".join(pieces) == text and len(pieces) > 3, pieces
with_tool = chat.bind_tools([get_weather], tool_choice="get_weather")
answer = with_tool.invoke("What is the weather?")
(call,) = answer.tool_calls
check_call(call["name"], call["args"])
gathered = None
for chunk in with_tool.stream("What is the weather?"):
    gathered = chunk if gathered is None else gathered + chunk
assert gathered.tool_calls[0]["args"] == call["args"], gathered
result = ToolMessage("Rain.", tool_call_id=call["id"])
after = chat.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage("Weather?"), answer, result])
assert not after.tool_calls, after
for method in ("json_schema", "function_calling"):
    report = chat.with_structured_output(Report, method=method).invoke("What is the weather?")
    assert isinstance(report, Report), (method, report)
embeddings = OpenAIEmbeddings(model=model, base_url=url, api_key=key, check_embedding_ctx_length=False)
first, second, same = embeddings.embed_documents(["The harbour lay still.", "A ship came in.", "The harbour lay still."])
length = sum(x * x for x in first)
assert abs(length - 1) < 1e-3 and first == same and first != second, length

# --- instructor ----------------------------------------------------------------------------------
plain = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    fields = {"model": model, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    messages = [{"role": "user", "content": "What is the weather?"}]
    report = client.chat.completions.create(response_model=Report, messages=messages, **fields)
    assert isinstance(report, Report), (mode, report)
    last = None
    for last in client.chat.completions.create_partial(response_model=Report, messages=messages, **fields):
        pass
    assert last is not None and last.kind == report.kind and last.degrees == report.degrees, (mode, last, report)

print("litellm, langchain-openai and instructor:", litellm.__name__, "is content")
