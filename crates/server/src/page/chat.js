// The key: kept for this browser, sent with every call.
const stored = { get: () => { try { return localStorage.getItem("oscar-key") || ""; } catch { return ""; } },
                 set: key => { try { localStorage.setItem("oscar-key", key); } catch { /* private window */ } } };
let key = stored.get();
const call = async (path, options = {}) => {
  const headers = { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
  const response = await fetch(path, { ...options, headers });
  const locked = response.status === 401;
  if (locked && $("locked").style.display !== "flex") setTimeout(() => $("key").focus());
  $("locked").style.display = locked ? "flex" : "none";
  return response;
};
$("locked").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  stored.set(key);
  poll();
  $("draft").focus();
});

// Chat.
let messages = [];
let running = null;

// Text to nodes, never to markup: code fences, inline code, bold.
const inline = (parent, text) => {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`]+`$/.test(part)) parent.append(make("code", "", part.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(part)) parent.append(make("strong", "", part.slice(2, -2)));
    else if (part) parent.append(part);
  }
};
const render = (parent, text) => {
  parent.replaceChildren();
  text.split(/^```/m).forEach((block, index) => {
    if (index % 2) {
      const pre = make("pre");
      pre.append(make("code", "", block.replace(/^[^\n]*\n?/, "").replace(/\n$/, "")));
      parent.append(pre);
      return;
    }
    for (const text of block.split(/\n{2,}/)) {
      if (!text.trim()) continue;
      const paragraph = make("p");
      inline(paragraph, text.replace(/^\n|\n$/g, ""));
      parent.append(paragraph);
    }
  });
};

const show = node => {
  const log = $("log");
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  $("welcome").hidden = true;
  $("welcome").style.display = "none";
  if (node) log.append(node);
  if (low || node) log.scrollTop = log.scrollHeight;
};

const complain = async response => {
  let text = "The server answered " + response.status + ".";
  try { text = (await response.json()).error.message; } catch { /* no JSON */ }
  return text;
};

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

// Calls of the last answer that have no result yet: the next messages are their results.
let waiting = [];
const hint = () => {
  $("draft").placeholder = waiting.length ? "Result of " + waiting[0].function.name : "Message";
};
const folded = name => {
  const box = make("details");
  box.append(make("summary", "", "Call of " + name), make("pre"));
  return box;
};
const tools = () => {
  const text = $("tools").value.trim();
  if (!text) return {};
  const value = JSON.parse(text);
  return Array.isArray(value) ? { tools: value } : value;
};

const answer = async () => {
  const node = make("div", "message assistant");
  const thought = make("details");
  const thinking = make("div");
  thought.append(make("summary", "", "Reasoning"), thinking);
  thought.hidden = true;
  const content = make("div", "", "…");
  const called = make("div");
  const note = make("div", "note number");
  node.append(thought, content, called, note);
  show(node);
  running = new AbortController();
  $("send").textContent = "Stop";
  const reply = { text: "", reasoning: "", calls: [] };
  const start = performance.now();
  let first = 0, tokens = 0, usage = null, reason = "", planned = false;
  const draw = () => {
    planned = false;
    thought.hidden = !reply.reasoning;
    thinking.textContent = reply.reasoning;
    render(content, reply.text || (reply.reasoning || reply.calls.length ? "" : "…"));
    reply.calls.forEach((call, index) => {
      const box = called.children[index] || called.appendChild(folded(call.function.name));
      box.lastChild.textContent = call.function.arguments;
    });
    show();
  };
  try {
    const system = $("system").value.trim();
    const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
                   stream: true, stream_options: { include_usage: true } };
    if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
    if ($("most").value !== "") body.max_tokens = Number($("most").value);
    Object.assign(body, tools());
    const response = await call("/v1/chat/completions",
      { method: "POST", body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error(await complain(response));
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) reason = choice.finish_reason;
      const { content: text, reasoning_content: why, tool_calls: calls } = choice.delta;
      if (!text && !why && !calls) continue;
      for (const call of calls || []) {
        reply.calls[call.index] ||= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
        reply.calls[call.index].function.arguments += call.function.arguments || "";
      }
      first = first || performance.now();
      tokens += 1;
      reply.text += text || "";
      reply.reasoning += why || "";
      if (!planned) { planned = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else { node.classList.add("error"); reply.text += (reply.text ? "\n\n" : "") + error.message; reason = "error"; }
  }
  const end = performance.now();
  draw();
  if (reason === "error" && !tokens) messages.pop();
  else messages.push({ role: "assistant", content: reply.text, ...(reply.reasoning ? { reasoning_content: reply.reasoning } : {}),
                       ...(reply.calls.length ? { tool_calls: reply.calls } : {}) });
  waiting = reason === "error" ? [] : [...reply.calls];
  hint();
  if (!reply.text && !reply.reasoning && !reply.calls.length) content.textContent = "(no text)";
  const facts = [];
  if (usage) tokens = usage.completion_tokens;
  if (tokens) facts.push(tokens + " tokens");
  if (tokens > 1 && first) facts.push(((tokens - 1) / Math.max(.001, (end - first) / 1000)).toFixed(1) + " tokens/s");
  if (first) facts.push("first after " + Math.round(first - start) + " ms");
  if (usage) facts.push(usage.prompt_tokens_details.cached_tokens + " of " + usage.prompt_tokens + " prompt tokens cached");
  if (reason && reason !== "stop") facts.push(reason);
  note.textContent = facts.join(" · ");
  running = null;
  $("send").textContent = "Send";
  show();
};

const send = () => {
  const text = $("draft").value.trim();
  if (running || !text) return;
  $("draft").value = "";
  grow();
  const call = waiting.shift();
  messages.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  show(make("div", "message user", text));
  hint();
  // The model goes on when all its calls have results.
  if (!waiting.length) answer();
  poll();
};
const stop = () => { if (running) running.abort(); };
const grow = () => { const draft = $("draft"); draft.style.height = "auto"; draft.style.height = draft.scrollHeight + 2 + "px"; };

$("composer").addEventListener("submit", event => { event.preventDefault(); running ? stop() : send(); });
$("draft").addEventListener("input", grow);
$("draft").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") stop(); });
$("fresh").addEventListener("click", () => {
  stop();
  messages = [];
  waiting = [];
  hint();
  for (const node of [...$("log").querySelectorAll(".message")]) node.remove();
  $("welcome").hidden = false;
  $("welcome").style.display = "";
  $("draft").focus();
});

// The cache as it lives.
const bytes = count => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return (count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)) + " " + unit;
    count /= 1024;
  }
};
const plain = count => count.toLocaleString("en");
const seen = new Map();
const rates = [];
let before = null, timer = 0;

const CELLS = 160;
const drawRequest = (request, info) => {
  const node = make("div", "strip" + (request.over ? " over" : ""));
  const evicted = request.evicted_tokens || 0;
  const total = request.sink_tokens + request.coded_tokens + evicted + request.recent_tokens;
  const head = make("div", "pair number");
  head.append(make("span", "", "#" + request.id + (request.over ? " ended" : "")));
  head.append(make("span", "soft", plain(request.prompt_tokens) + " in, " + plain(request.generated_tokens) + " out, "
    + plain(request.cached_tokens) + " from cache"));
  const pages = make("div", "pages");
  pages.setAttribute("role", "img");
  pages.setAttribute("aria-label", request.sink_tokens + " sink, " + request.coded_tokens + " quantized and "
    + request.recent_tokens + " recent tokens" + (evicted ? ", " + evicted + " evicted" : ""));
  const counts = [["sink", request.sink_tokens], ["coded", request.coded_tokens], ["evicted", evicted],
    ["recent", request.recent_tokens]]
    .map(([kind, tokens]) => [kind, Math.ceil(tokens / info.page_tokens)]);
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  const scale = Math.max(1, all / CELLS);
  for (const [kind, count] of counts)
    for (let cell = 0; cell < Math.min(count, Math.max(1, Math.round(count / scale))); cell++) pages.append(make("i", kind));
  const full = total * info.full_block_bytes / info.page_tokens
    + Math.min(total, info.sliding_window || 0) * info.sliding_block_bytes / info.page_tokens;
  const foot = make("div", "soft number", bytes(request.bytes) + ", " + bytes(full) + " in BF16"
    + (evicted ? " · kept " + plain(request.coded_tokens) + " of " + plain(request.coded_tokens + evicted) + " rows" : "")
    + (scale > 1 ? " · one block is " + scale.toFixed(1) + " pages" : ""));
  node.append(head, pages, foot);
  if (request.views) {
    const last = request.views.length - 1;
    const views = request.views.map((view, at) =>
      make(view.read ? "b" : "span", "", (at === last ? "all " : "episode " + at + " ") + plain(view.rows)));
    const line = make("div", "soft number views", "views, rows kept: ");
    line.append(...views.flatMap((view, at) => at ? [" · ", view] : [view]));
    node.append(line);
  }
  return node;
};

const draw = state => {
  const { info, stats, requests } = state;
  const bits = Number(info.kv_bits.toFixed(2));
  $("about").textContent = info.model + " · " + info.kv_format + " cache, " + bits + " bits · " + info.device;
  $("cache-note").textContent = info.cache_note || "";
  $("cache-note").hidden = !info.cache_note;
  document.title = "OSCAR · " + info.model;
  $("format").textContent = "This cache (" + info.kv_format + ")";
  $("coded-name").textContent = info.kv_format + " history, " + bits + " bits";
  $("ours").textContent = bytes(stats.cache_bytes);
  $("full").textContent = bytes(stats.bf16_bytes);
  const top = Math.max(stats.bf16_bytes, stats.cache_bytes, 1);
  $("ours-bar").style.width = 100 * stats.cache_bytes / top + "%";
  $("full-bar").style.width = 100 * stats.bf16_bytes / top + "%";
  $("ratio").textContent = stats.cache_bytes
    ? (stats.bf16_bytes / stats.cache_bytes).toFixed(1) + " times smaller, BF16 windows included" : "Nothing is held yet.";

  const now = performance.now();
  if (before && now - before.now > 50) {
    const rate = Math.max(0, (stats.generated_tokens - before.tokens) * 1000 / (now - before.now));
    rates.push(rate);
    if (rates.length > 120) rates.shift();
    $("rate").textContent = rate < 10 ? rate.toFixed(1) : plain(Math.round(rate));
    const highest = Math.max(1, ...rates);
    $("history").setAttribute("points", rates.map((value, index) => 120 - rates.length + index + "," + (29 - 28 * value / highest)).join(" "));
  }
  before = { now, tokens: stats.generated_tokens };
  $("hits").textContent = stats.prompt_tokens ? Math.round(100 * stats.hit_rate) + " %" : "–";
  $("queue").textContent = stats.running + " / " + stats.waiting;

  for (const request of seen.values()) request.over = true;
  for (const request of requests) seen.set(request.id, { ...request, over: false, last: now });
  for (const [id, request] of seen) if (request.over && now - request.last > 15000) seen.delete(id);
  const shown = [...seen.values()].sort((a, b) => a.over - b.over || b.id - a.id).slice(0, 12);
  $("requests").replaceChildren(...(shown.length ? shown.map(request => drawRequest(request, info))
    : [make("div", "soft", "None at the moment.")]));

  const parts = [
    ["var(--coded)", (stats.coded_pages - stats.cached_coded_pages) * info.coded_block_bytes, 1],
    ["var(--recent)", (stats.full_pages - stats.cached_full_pages) * info.full_block_bytes, 1],
    ["var(--recent)", (stats.sliding_pages - stats.cached_sliding_pages) * info.sliding_block_bytes, 1],
    ["var(--coded)", stats.cached_coded_pages * info.coded_block_bytes, .45],
    ["var(--recent)", stats.cached_full_pages * info.full_block_bytes, .45],
    ["var(--recent)", stats.cached_sliding_pages * info.sliding_block_bytes, .45],
  ];
  $("budget").replaceChildren(...parts.map(([colour, size, strength]) => {
    const part = make("i");
    part.style.cssText = "background:" + colour + ";opacity:" + strength + ";width:"
      + 100 * Math.max(0, size) / Math.max(1, info.kv_budget_bytes) + "%";
    return part;
  }));
  $("pages").textContent = plain(stats.coded_pages) + " quantized and " + plain(stats.full_pages) + " BF16 pages"
    + (info.sliding_window ? ", " + plain(stats.sliding_pages) + " of sliding layers" : "") + ", of them "
    + plain(stats.cached_coded_pages + stats.cached_full_pages + stats.cached_sliding_pages) + " kept for later prompts (pale); "
    + bytes(info.kv_budget_bytes) + " allowed. " + plain(stats.demoted_tokens) + " tokens quantized so far, "
    + plain(stats.evicted_pages) + " pages evicted, " + plain(stats.preemptions) + " preemptions."
    + (stats.store ? " Page store: " + bytes(stats.store.ram_bytes) + " in memory, " + bytes(stats.store.disk_bytes)
      + " on disk; " + plain(stats.cached_ram_tokens) + " prompt tokens came back from memory and "
      + plain(stats.cached_disk_tokens) + " from disk." : "")
    + (stats.cached_shared_tokens ? " " + plain(stats.cached_shared_tokens) + " came from the shared store." : "")
    + (stats.cached_peer_tokens ? " " + plain(stats.cached_peer_tokens) + " came from other machines." : "");
};

const poll = async () => {
  clearTimeout(timer);
  let pause = 3000;
  try {
    const response = document.hidden ? null : await call("/internal/state");
    if (response && response.ok) {
      const state = await response.json();
      draw(state);
      pause = state.stats.running || running ? 300 : 1500;
    }
  } catch { $("about").textContent = "The server does not answer."; }
  clearTimeout(timer);
  timer = setTimeout(poll, pause);
};
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
