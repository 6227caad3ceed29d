"""A report in a headless Chromium. Usage: report.py CHROMIUM FILE PLOTS [FOLDER FOR SCREENSHOTS]"""

import base64
import pathlib
import sys

from browser import FITS, started

chromium, file, plots, *screenshots = sys.argv[1:]

WIDER = """[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.tagName + '.' + e.className)"""
# Each drawing: its size, how many shapes it has, and the words that stick out of it.
PLOTS = """[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const out = [...svg.querySelectorAll('text')].filter(text => {
    const word = text.getBoundingClientRect();
    return word.left < box.left - 1 || word.right > box.right + 1 || word.top < box.top - 1 || word.bottom > box.bottom + 1;
  });
  return {width: box.width, height: box.height, out: out.map(text => text.textContent),
          shapes: svg.querySelectorAll('path, rect, circle, line, polyline, polygon').length};
})"""


def look(browser, width, height, mobile):
    browser.open(pathlib.Path(file).resolve().as_uri(), width, height, mobile)
    browser.wait("document.readyState === 'complete' && location.protocol === 'file:'")
    if screenshots:
        picture = browser.command("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        pathlib.Path(screenshots[0], f"{width}.png").write_bytes(base64.b64decode(picture))
    assert browser.js("document.title"), "a page without a title"
    assert browser.js(FITS), f"wider than {width} pixels: {browser.js(WIDER)}"
    drawings = browser.js(PLOTS)
    assert len(drawings) == int(plots), f"{len(drawings)} drawings: {drawings}"
    for drawing in drawings:
        assert drawing["width"] >= 80 and drawing["height"] >= 30 and drawing["shapes"] >= 2, drawing
        assert not drawing["out"], f"words outside their drawing: {drawing}"


with started(chromium) as browser:
    look(browser, 1280, 800, False)
    look(browser, 360, 740, True)
print("the report is content")
