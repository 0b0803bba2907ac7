/* The table of endpoints, and steering them. */
"use strict";

const MANY = 16;  // endpoints, from which on rows are low

// --- The fleet -----------------------------------------------------------------------------------------------------

const STATES = {
  __proto__: null,  // a state of any name is looked up in it
  up: ["●", "good"], starting: ["○", "info"], half_open: ["◐", "warn"], ejected: ["▲", "bad"], down: ["✕", "bad"],
  draining: ["▽", "warn"], drained: ["▽", "warn"], leaving: ["▷", "warn"],
  asleep: ["☾", "info"], waking: ["◔", "info"], falling_asleep: ["◕", "info"], off: ["◌", "info"],
};
/** Why it is not awake; null: it is, or is just down. */
const sleepOf = (one) => (!one.sleep || ["awake", "unknown"].includes(one.sleep.state) ? null : one.sleep.state);
const stateOf = (one) => (one.leaving ? "leaving" : one.draining ? (one.drained ? "drained" : "draining") : sleepOf(one) ?? one.health);
const isServing = (one) => one.health === "up" && !one.draining && !one.leaving && sleepOf(one) === null;
const isBlind = (one) => one.metrics_age_s !== null && one.waiting === null && one.running === null && one.kv_utilization === null;
const needsLook = (one) => (!isServing(one) && sleepOf(one) === null) || one.sleep?.failures > 0 || one.backing_off || one.share < 1 || isBlind(one);

/** What needs a look most comes first: what is down, what is only slowed, the rest. */
const attentionOf = (one) => (!needsLook(one) ? 2 : ["down", "ejected"].includes(stateOf(one)) ? 0 : 1);

function notesOf(one) {
  const notes = [];
  if (one.reason && !["up", "starting"].includes(one.health) && sleepOf(one) === null) notes.push(plain(one.reason));
  if (one.draining || one.leaving) {
    if (one.health !== "up") notes.push(words(one.health));
    if (one.in_flight) notes.push(`${number(one.in_flight)} still running`);
    else if (one.leaving) notes.push("no requests");
  }
  if (sleepOf(one) !== null && one.sleep.left_s !== null) notes.push(`awake in about ${duration(one.sleep.left_s)}`);
  if (one.sleep?.failures) notes.push(`${count(one.sleep.failures, "failure")} in a row`);
  if (Number.isFinite(one.lease_s)) notes.push(`registered for ${duration(one.lease_s)} more`);
  if (one.readmitted) notes.push("used although ejected");
  if (one.backing_off) notes.push("backing off");
  if (one.share < 1) notes.push(`slow start, ${percent(one.share)}`);
  if (isBlind(one) && one.health !== "down") notes.push(`no metrics for ${duration(one.metrics_age_s)}`);
  return notes.join(", ");
}

/** What was learned; null while it is only assumed. */
const learned = (found, name) => (found === null || found.samples?.[name] === 0 ? null : found[name]);
const fullBy = (one) => one.learned?.full_by ?? null;
/** How many more requests it runs at once; null: nothing showed it yet. */
function roomOf(one) {
  if (fullBy(one) !== null) return 0;
  const limit = one.learned?.limit ?? null;
  return limit === null ? null : Math.max(0, limit - one.in_flight - one.elsewhere);
}
const showRoom = (left, one) => (left === null ? "–" : fullBy(one) !== null ? `full: ${words(fullBy(one))}` : `of ${number(one.learned.limit)}`);
const thousand = (value) => (value === null ? null : 1000 * value);

const ATTENTION = { value: attentionOf };
const COLUMNS = [
  { key: "name", head: "endpoint", value: (one) => one.name, text: true },
  { key: "state", head: "state", value: (one) => Object.keys(STATES).indexOf(stateOf(one)), text: true },
  { key: "in_flight", head: "in flight", group: "lbproxy", value: (one) => one.in_flight, show: (own, one) => (one.elsewhere ? `${number(own)} + ${number(one.elsewhere)}` : number(own)), hint: "requests from lbproxy in flight there, + those of other replicas" },
  { key: "room", head: "room", group: "lbproxy", value: roomOf, show: showRoom, tone: (one) => fullBy(one) && "warn", hint: "how many requests it runs at once, as far as was learned; or why it gets no more now" },
  { key: "held", head: "held", group: "lbproxy", value: (one) => one.learned?.held ?? null, tone: (one) => one.learned?.held && "warn", hint: "requests that wait in lbproxy for room there" },
  { key: "waiting", head: "waiting", group: "engine", value: (one) => one.waiting, hint: "requests queued in the engine" },
  { key: "running", head: "running", group: "engine", value: (one) => one.running, hint: "requests running in the engine" },
  { key: "kv", head: "KV cache", group: "engine", value: (one) => one.kv_utilization, hint: "share of the KV cache in use" },
  { key: "requests", head: "ended", group: "recent requests", value: (one) => one.recent?.requests ?? null, hint: "of the remembered requests, those that ended there" },
  { key: "failed", head: "failed", group: "recent requests", value: (one) => one.recent?.failed ?? null, tone: (one) => one.recent?.failed && "bad", hint: "of these, those that failed there: not those that a client ended" },
  { key: "first", head: "first byte, ms", group: "recent requests", value: (one) => one.recent?.first_byte_ms ?? null, show: figure, hint: "median time from placing to a stream's first byte" },
  { key: "off", head: "off", group: "recent requests", value: (one) => one.recent?.first_byte_off ?? null, show: (off) => (off === null ? "–" : `${number(off, 1)}x`), tone: (one) => one.recent?.first_byte_off > 2 && "warn", hint: "how many times as long as predicted the latest streams took to their first byte" },
  { key: "hits", head: "cache hits", group: "recent requests", value: (one) => one.recent?.hit_ratio ?? null, show: percent, hint: "share of prompt tokens that the responses' usage reported as cached" },
  { key: "wait", head: "wait, ms", group: "learned", value: (one) => one.learned?.wait_ms ?? null, show: figure, hint: "time that a request placed there now waits before its prefill begins, as predicted" },
  { key: "prefill", head: "ms / 1,000 tok", group: "learned", value: (one) => thousand(learned(one.learned, "prefill_ms_per_token")), show: figure, hint: "time to prefill 1,000 prompt tokens; a dash until it is learned" },
  { key: "gap", head: "ms / token", group: "learned", value: (one) => learned(one.learned, "gap_ms"), show: figure, hint: "time between two tokens of a response, at the current load; a dash until it is learned" },
];
let order = { key: null, up: false };  // null: by attention, then as in the settings

/** The row above the heads, which says what some of them have in common. */
function groupsOf(columns) {
  const groups = node("tr", { class: "groups" });
  for (let index = 0; index < columns.length;) {
    const { group } = columns[index];
    let span = 1;
    while (group && columns[index + span]?.group === group) span += 1;
    groups.append(group ? node("th", { colspan: span, scope: "colgroup", class: "named" }, group) : node("td"));
    index += span;
  }
  return groups;
}

function makeHead() {
  const groups = groupsOf(COLUMNS);
  groups.append(node("td"));
  const heads = node("tr");
  for (const column of COLUMNS) {
    const button = node("button", { type: "button", title: column.hint ?? `sort by ${column.head}` }, column.head);
    const head = node("th", { scope: "col", class: column.text ? "" : "number" }, button);
    button.addEventListener("click", () => {
      if (order.key !== column.key) order = { key: column.key, up: Boolean(column.text) };
      else if (order.up === Boolean(column.text)) order.up = !order.up;
      else order = { key: null, up: false };
      for (const other of heads.children) set(other, "aria-sort", null);
      if (order.key) set(head, "aria-sort", order.up ? "ascending" : "descending");
      if (last) drawFleet(last, true);
    });
    heads.append(head);
  }
  heads.append(node("td"));
  at("endpoints").tHead.append(groups, heads);
}

function makeRow() {
  const row = node("tr");
  const name = node("th", { scope: "row" }, node("bdi", { class: "name" }), node("span", { class: "role" }), node("span", { class: "about" }));
  const state = node("td", {}, node("span", { class: "symbol", "aria-hidden": "true" }), node("span"), " ", node("span", { class: "note" }));
  const cells = COLUMNS.slice(2).map((column) => node("td", { class: "number", "data-head": column.head }, ...(column.key === "kv" ? makeMeter() : [])));
  const button = node("button", { type: "button" });
  button.addEventListener("click", () => steer(row.shown, button));
  row.append(name, state, ...cells, node("td", { class: "number steer" }, button));
  row.parts = { name: name.children[0], role: name.children[1], about: name.children[2], state: state.children, cells, button };
  return row;
}
function makeMeter() {
  return [node("span", { class: "meter", "aria-hidden": "true" }, node("i")), node("span", { class: "percent" })];
}

function drawRow(row, one) {
  row.shown = one;
  const { name, role, about, state, cells, button } = row.parts;
  const [symbol, tone] = STATES[stateOf(one)] ?? ["?", ""];
  put(name, plain(one.name));
  const parts = [one.role === "both" ? "" : plain(one.role), one.tier > 1 ? `tier ${one.tier}` : ""].filter(Boolean);
  role.hidden = parts.length === 0;
  put(role, parts.join(", "));
  const limits = Object.entries(one.limits_used).map(([name, share]) => `\n${plain(name)}: ${Math.round(100 * share)} % used`).join("");
  const handover = one.role === "both" ? "" : `\nrole: ${plain(one.role)}, connector: ${one.connector === null ? "unknown" : plain(one.connector)}`;
  const models = one.models === null ? "models unknown" : one.models.slice(0, 8).map(plain).join(", ") || "no model";
  const memory = (one.in_memory ?? []).map((model) => `${plain(model.model)} (${plain(model.state)} for ${duration(model.for_s)})`);
  put(about, one.in_memory ? `in memory: ${memory.join(", ") || "no model"}` : one.engine === "auto" ? models : `${plain(one.engine)} · ${models}`);
  set(name.parentElement, "title", `${plain(one.name)}\n${plain(one.url)}\n${plain(one.engine)}: ${models}\nfrom: ${plain(one.from)}${handover}${limits}`);
  put(state[0], symbol);
  put(state[1], words(stateOf(one)));
  set(state[0], "class", `symbol ${tone}`);
  set(state[1], "class", tone);
  put(state[2], notesOf(one));
  set(state[2], "title", notesOf(one));
  set(row, "class", tone === "bad" ? "off" : one.draining || one.leaving ? "aside" : "");
  COLUMNS.slice(2).forEach((column, index) => {
    const value = column.value(one);
    if (column.key === "kv") drawMeter(cells[index], value);
    else put(cells[index], column.show ? column.show(value, one) : number(value));
    const tone = column.tone?.(one) || (value ? "" : "nil");
    set(cells[index], "class", `number ${column.key} ${tone}`.trim());
  });
  put(button, one.draining ? "Undrain" : "Drain");
  set(button, "aria-label", `${one.draining ? "Undrain" : "Drain"} ${plain(one.name)}`);
  button.hidden = one.leaving;
}
function drawMeter(cell, value) {
  const bar = cell.children[0].firstChild;
  cell.children[0].hidden = value === null;
  bar.style.width = `${Math.round(100 * Math.min(1, value ?? 0))}%`;
  set(bar, "class", value > 0.9 ? "warn" : "");
  put(cell.children[1], percent(value));
}

const textOf = (one) => [one.name, one.url, one.engine, one.role, stateOf(one), ...(one.models ?? [])].join("\n").toLowerCase();

/** Rows do not change places under a pointer or while a button of theirs has the focus, unless `now`. */
function drawFleet(frame, now = false) {
  const table = at("endpoints");
  const body = table.tBodies[0];
  const wanted = at("filter").value.trim().toLowerCase();
  let shown = frame.endpoints.filter((one) => (!at("attention").checked || needsLook(one)) && textOf(one).includes(wanted));
  const column = COLUMNS.find((one) => one.key === order.key) ?? ATTENTION;
  shown = sorted(shown, column, !now && (body.matches(":hover") || body.contains(document.activeElement)));
  keep(body, shown, (one) => `${one.name}\n${one.url}`, makeRow, drawRow);
  table.classList.toggle("many", frame.endpoints.length >= MANY);
  at("none").hidden = shown.length > 0;
  put(at("none"), frame.endpoints.length ? `None of ${frame.endpoints.length} endpoints.` : "There are no endpoints.");
}
let places = new Map();
function sorted(endpoints, column, still) {
  if (!still) {
    const way = order.up || column === ATTENTION ? 1 : -1;
    const by = [...endpoints].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x === null || y === null) return (x === null) - (y === null);  // the unknown last, either way
      return way * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
    places = new Map(by.map((one, index) => [one.name, index]));
  }
  return [...endpoints].sort((a, b) => (places.get(a.name) ?? 1e9) - (places.get(b.name) ?? 1e9));
}

async function steer(one, button) {
  const draining = !one.draining;
  if (draining && isServing(one) && last.endpoints.filter(isServing).length === 1) {
    if (!(await confirmed(`${plain(one.name)} is the last endpoint that takes requests. Drain it anyway?`, "Drain"))) return;
  }
  button.disabled = true;
  try {
    const answer = await ask(`endpoints/${encodeURIComponent(one.name)}/${draining ? "drain" : "undrain"}`, { method: "POST" });
    const { in_flight: left } = await answer.json();
    say(draining ? `${plain(one.name)} gets no new requests; ${left ? `${count(left, "request")} still running` : "no requests run there"}.` : `${plain(one.name)} takes requests again.`);
  } catch (error) {
    say(`${plain(one.name)} was not changed: ${error instanceof Refused ? error.message : "lbproxy does not respond"}`);
  } finally {
    button.disabled = false;
    button.focus();
  }
}
function confirmed(text, yes) {
  const dialog = at("confirm");
  put(at("confirm-text"), text);
  put(at("confirm-yes"), yes);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}
