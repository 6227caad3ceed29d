// Used by both pages.
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, kind, text) => {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
};
