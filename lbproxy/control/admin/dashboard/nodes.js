/* Text and nodes. What comes from servers and clients is put down as text, through `plain`, never as HTML; nodes stay where
   they are while what they show does, so that focus, selection and scrolling survive. */
"use strict";

const MAX_TEXT = 300;

const at = (id) => document.getElementById(id);

// --- Text ----------------------------------------------------------------------------------------------------------

/** A value as text: a dash for what is unknown, a box for what would be invisible or turn the line around. */
function plain(value) {
  if (value === null || value === undefined || value === "") return "–";
  const text = String(value).slice(0, MAX_TEXT + 1).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, "\u25a1");
  return text.length > MAX_TEXT ? text.slice(0, MAX_TEXT) + "…" : text;
}
const words = (value) => plain(value).replaceAll("_", " ");
const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
/** Three digits that count, and no more. */
const figure = (value) => number(value, value === null || value === undefined || value >= 100 ? 0 : value >= 10 ? 1 : 2);
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const clock = (stamp) => new Date(stamp).toLocaleTimeString("en-GB");
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format;
const count = (many, one, more = one + "s") => `${number(many)} ${many === 1 ? one : more}`;
function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min` : `${Math.floor(seconds / 86400)} days`;
}
function size(bytes) {
  const step = bytes < 1 << 20 ? [1024, "KiB"] : [1 << 20, "MiB"];
  return bytes < 1024 ? `${bytes} bytes` : `${number(bytes / step[0], 1)} ${step[1]}`;
}

// --- Nodes ---------------------------------------------------------------------------------------------------------

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
function set(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}
/** Make `parent` have one child for each item, in order; a child stays the same node while its key stays. */
function keep(parent, items, keyOf, make, update) {
  const before = parent.kept ?? new Map();
  const now = new Map();
  for (const item of items) {
    let key = keyOf(item);
    while (now.has(key)) key += "\n";
    const child = before.get(key) ?? make(item);
    update(child, item);
    now.set(key, child);
  }
  for (const [key, child] of before) if (now.get(key) !== child) child.remove();
  let place = parent.firstElementChild;
  for (const child of now.values()) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  parent.kept = now;
}

let silence = 0;
/** Say something for a moment, to screen readers too. */
function say(text) {
  clearTimeout(silence);
  put(at("message"), text);
  silence = setTimeout(() => put(at("message"), ""), 6000);
}
