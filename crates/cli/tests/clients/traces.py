"""A collector of OpenTelemetry that decodes what `oscar serve --otlp-endpoint` sends. Usage: traces.py OSCAR_BINARY

The messages are decoded by the published `opentelemetry-proto`. Requests with and without `traceparent`, one of them not
sampled, streamed and whole: each sampled one is a span with the steps that served it as children.
"""

import http.client
import http.server
import json
import re
import signal
import subprocess
import sys
import threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNSAMPLED = "1bf7651916cd43dd8448eb211c80319c"
messages = []


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf", self.path
        body = self.rfile.read(int(self.headers["content-length"]))
        messages.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def attributes(owner):
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in owner.attributes}


collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=collector.serve_forever, daemon=True).start()
command = [sys.argv[1], "serve", "--port", "0", "--threads", "1", "--context", "2048", "--log", "error",
           "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"]
server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
for line in server.stderr:
    if found := re.search(r" on http://127\.0\.0\.1:(\d+)", line):
        port = int(found[1])
        break
else:
    raise AssertionError("the server ended before it served")
threading.Thread(target=server.stderr.read, daemon=True).start()


def chat(traceparent, **fields):
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 5, "ignore_eos": True, **fields}
    headers = {"content-type": "application/json", **({"traceparent": traceparent} if traceparent else {})}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


assert chat(f"00-{TRACE}-{PARENT}-01", stream=True) == 200
assert chat(f"00-{UNSAMPLED}-{PARENT}-00") == 200
assert chat(None) == 200
assert chat(f"00-{TRACE}-{PARENT}-01", temperature=-1) == 400
server.send_signal(signal.SIGTERM)
assert server.wait(60) == 0

groups = [group for message in messages for group in message.resource_spans]
assert all(attributes(group.resource)["service.name"] == "oscar" for group in groups)
spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
traces = {span.trace_id.hex() for span in spans}
assert TRACE in traces and UNSAMPLED not in traces and len(traces) == 2, traces
assert len({span.span_id for span in spans}) == len(spans) and all(len(span.span_id) == 8 for span in spans)
requests = [span for span in spans if span.name == "http"]
assert len(requests) == 3, [span.name for span in spans]
given = [span for span in requests if span.trace_id.hex() == TRACE]
assert [span.parent_span_id.hex() for span in given] == [PARENT, PARENT]
statuses = {}
for request in requests:
    facts = attributes(request)
    assert request.kind == 2 and facts["http.route"] == "/v1/chat/completions", facts
    steps = [span for span in spans if span.parent_span_id == request.span_id]
    assert all(span.name == "step" and span.trace_id == request.trace_id for span in steps)
    # One step reads the prompt and yields the first token.
    assert len(steps) == (5 if facts["http.response.status_code"] == 200 else 0), (facts, len(steps))
    for step in steps:
        assert request.start_time_unix_nano <= step.start_time_unix_nano <= step.end_time_unix_nano
        assert step.end_time_unix_nano <= request.end_time_unix_nano, "a request lasts until its last step ends"
    names = {event.name for event in request.events}
    assert not steps or {"admitted", "ended"} <= names, names
    statuses[facts["http.response.status_code"]] = statuses.get(facts["http.response.status_code"], 0) + 1
assert statuses == {200: 2, 400: 1}, statuses
print(f"{len(spans)} spans in {len(messages)} messages; opentelemetry-proto is content")
