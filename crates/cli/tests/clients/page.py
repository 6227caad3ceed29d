"""The web page in a headless Chromium. Usage: page.py CHROMIUM BASE_URL"""

import json
import sys
import threading
import urllib.request

from browser import FITS, PATIENCE, started

chromium, base_url = sys.argv[1:]


READY = "document.getElementById('about') && document.getElementById('about').textContent.includes('oscar-15m')"
ANSWER = "[...document.querySelectorAll('.message:not(.user)')].map(m => m.textContent).join('|')"
IDLE = "document.getElementById('send').textContent === 'Send'"
WATCH = """(() => { window.lengths = new Set();
  new MutationObserver(() => window.lengths.add(document.getElementById('log').textContent.length))
    .observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true}); })()"""
QUESTION = "Who are you?"
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
TOOLS = {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}}
# A length of the log at which only a part of the last answer was there.
STREAMED = """(() => { const lengths = [...window.lengths], last = Math.max(...lengths);
  const answers = document.querySelectorAll('.message:not(.user)');
  const size = answers[answers.length - 1].textContent.length;
  return lengths.some(length => length > last - size && length < last); })()"""


def text(name):
    return f"document.getElementById('{name}').textContent"


def long_answers(enough):
    """Keeps a request running that the panel can show, however fast the machine and however rarely the page looks."""
    body = {"prompt": "The harbour lay still. " * 60, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(base_url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    while not enough.is_set():
        urllib.request.urlopen(request, timeout=PATIENCE).read()


def desktop(browser):
    browser.open(base_url + "/", 1280, 800, False)
    browser.wait(READY)
    assert browser.js(FITS)
    browser.js(WATCH)
    browser.say(QUESTION)
    browser.wait(f"{IDLE} && ({ANSWER}).includes('small language model')")
    # A fast machine may finish between two frames, so the question may be asked again.
    for _ in range(5):
        if browser.js(STREAMED):
            break
        browser.js("window.lengths.clear()")
        browser.say(QUESTION)
        browser.wait(f"window.lengths.size > 0 && {IDLE}")
    assert browser.js(STREAMED), "no part of an answer was ever visible: it did not stream"
    # The cache panel, idle and while somebody else's answer is running.
    browser.wait(f"/[0-9]/.test({text('ours')}) && /[0-9]/.test({text('full')}) && /BF16/.test({text('pages')})")
    enough = threading.Event()
    running = threading.Thread(target=long_answers, args=(enough,))
    running.start()
    try:
        browser.wait(f"{text('queue')}.startsWith('1 /')")
        browser.wait("document.querySelectorAll('#requests .sink, #requests .coded, #requests .recent').length > 2")
    finally:
        enough.set()
        running.join()
    browser.wait(f"{text('queue')}.startsWith('0 /')")
    # Views of a running request: what each keeps, the one that is read in bold.
    views = """(() => { const node = drawRequest({id: 1, prompt_tokens: 9, generated_tokens: 1, cached_tokens: 0,
      sink_tokens: 64, coded_tokens: 70, evicted_tokens: 500, recent_tokens: 64, bytes: 1,
      views: [{rows: 60, read: false}, {rows: 61, read: true}, {rows: 62, read: false}]}, {page_tokens: 64, full_block_bytes: 1});
      return node.querySelector('.views').textContent + '|' + node.querySelector('.views b').textContent; })()"""
    assert browser.js(views) == "views, rows kept: episode 0 60 · episode 1 61 · all 62|episode 1 61"
    # The conversation goes on. A limit leaves room for more of it.
    browser.js("document.getElementById('most').value = '64'")
    browser.say("Tell me more.")
    browser.wait(f"{IDLE} && document.querySelectorAll('.message:not(.user)').length === 2")

    # A tool call is folded, and the next message is its result.
    browser.js(f"document.getElementById('tools').value = {json.dumps(json.dumps(TOOLS))}")
    browser.say("What time is it?")
    browser.wait(f"{IDLE} && [...document.querySelectorAll('.message details:not([hidden]) summary')].some(s => s.textContent === 'Call of now')")
    assert not browser.js("[...document.querySelectorAll('.message details')].some(box => box.open)"), "calls are folded"
    assert browser.js("document.getElementById('draft').placeholder") == "Result of now"
    browser.js("document.getElementById('tools').value = ''")
    browser.say("Noon.")
    browser.wait(f"{IDLE} && document.querySelectorAll('.message:not(.user)').length === 4")
    assert browser.js("document.getElementById('draft').placeholder") == "Message"


def phone(browser):
    browser.open(base_url + "/", 360, 740, True)
    browser.wait(READY)
    assert browser.js(FITS), "the empty page is wider than a phone"
    browser.js("document.getElementById('draft').focus()")
    browser.say("w" * 300 + " " + QUESTION)
    browser.wait(f"{IDLE} && document.querySelectorAll('.message:not(.user)').length === 1")
    assert browser.js(FITS), "a long word makes the page wider than a phone"


with started(chromium) as browser:
    desktop(browser)
    phone(browser)
print("the page is content")
