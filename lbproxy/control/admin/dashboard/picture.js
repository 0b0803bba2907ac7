/* Everything else that one frame shows, and the start. The last of the files. */
"use strict";

const WINDOW_MS = 600000;  // of the small charts, at most and at least
const MIN_WINDOW_MS = 60000;
const GAP_MS = 16000;      // points come each 5 s; a line is broken where some are missing

// --- At a glance ---------------------------------------------------------------------------------------------------

const perSecond = (name) => (point) => point[name] / point.seconds;
const TILES = [
  { head: "First byte of streams", lines: [["p50", (point) => point.first_byte_ms.p50], ["p95", (point) => point.first_byte_ms.p95]], value: (point) => firstBytes(point.first_byte_ms) },
  { head: "In flight, and held", lines: [["in flight", (point) => point.in_flight], ["held", (point) => point.waiting]],
    value: (_, frame) => `${number(frame.endpoints.reduce((sum, one) => sum + one.in_flight, 0))} / ${number(frame.queue.waiting)}`,
    note: (list) => heldFor(list) },
  { head: "Prompt tokens from caches", lines: [["cached", hits]], value: (point) => percent(hits(point)), top_of: 1, show: percent },
  { head: "Response tokens per second", lines: [["tokens", perSecond("completion_tokens")]], value: (point) => figure(perSecond("completion_tokens")(point)) },
  { head: "Requests, failed per second", lines: [["ended", perSecond("requests")], ["failed", failures]],
    value: (point) => `${figure(perSecond("requests")(point))} / ${figure(failures(point))}`, tone: (point) => (failures(point) ? "warn" : "") },
];
/** Of those that lbproxy or an endpoint failed, or lbproxy refused. */
function failures(point) {
  return (point.errors + point.rejected) / point.seconds;
}
/** null: no response of these seconds said how much of its prompt was cached. */
function hits(point) {
  return point.prompt_tokens ? point.cached_tokens / point.prompt_tokens : null;
}
const WAITS = {
  __proto__: null,  // a reason of any name is looked up in it
  held: "best endpoint full", busy: "all endpoints busy", full: "all endpoints at their limit", behind: "behind others", flow: "limit of the flow", waking: "model wakes up",
};
const whyOf = (reason) => WAITS[reason] ?? words(reason);
/** Why most of those waited that were held in the window. */
function heldFor(list) {
  const sums = new Map();
  for (const [reason, many] of list.flatMap((point) => Object.entries(point.waiting_by_reason))) sums.set(reason, (sums.get(reason) ?? 0) + many);
  const [most] = [...sums].sort((a, b) => b[1] - a[1]);
  return most ? whyOf(most[0]) : "";
}
function firstBytes({ p50, p95 }) {
  if (p50 === null) return "–";  // no stream began in these five seconds
  return p95 >= 1000 ? `${figure(p50 / 1000)} / ${figure(p95 / 1000)} s` : `${number(p50)} / ${number(p95)} ms`;
}
const SVG = "http://www.w3.org/2000/svg";
let points = new Map();  // the newest ten minutes by their stamp, also those from before a restart
let newest = null;

function makeTiles() {
  for (const tile of TILES) {
    tile.figure = node("span", { class: "figure" }, "–");
    tile.picture = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ viewBox: "0 0 300 50", preserveAspectRatio: "none", role: "img" })) tile.picture.setAttribute(name, value);
    for (const kind of ["floor", "area", "first", "second"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", kind);
      tile.picture.append(path);
    }
    tile.picture.children[0].setAttribute("d", "M0 49.5H300");
    tile.span = node("span");
    tile.top = node("span");
    tile.why = node("small");
    const keys = tile.lines.length > 1 ? tile.lines.map(([name], index) => node("span", { class: index ? "key second" : "key" }, name)) : [];
    at("tiles").append(node("article", { class: "tile" }, node("h3", {}, tile.head), node("p", { class: "now" }, tile.figure, tile.why), tile.picture, node("p", { class: "foot" }, ...(keys.length ? keys : [tile.span]), tile.top)));
  }
}

/** A round number not below `value`. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((one) => one * unit).find((one) => one >= value);
}
function pathOf(values, from, to, top, closed) {
  let path = "";
  let before = null;
  let start = 0;
  for (const [time, value] of [...values.filter(([, known]) => known !== null), [Infinity, null]]) {
    const goesOn = before !== null && value !== null && time - before[0] <= GAP_MS;
    if (before !== null && !goesOn) path += closed ? `L${before[1]} 49.5L${start} 49.5Z` : "h0.01";
    before = null;
    if (value === null) continue;
    const x = ((300 * (time - from)) / (to - from)).toFixed(1);
    if (!goesOn) start = x;
    path += `${goesOn ? "L" : "M"}${x} ${(49.5 - (46 * value) / top).toFixed(1)}`;
    before = [time, x];
  }
  return path;
}
function drawTiles(frame) {
  for (const point of frame.history) points.set(point.at, { ...point, time: Date.parse(point.at) });
  const to = Date.parse(frame.at);
  points = new Map([...points].filter(([, point]) => point.time > to - WINDOW_MS && point.time <= to + 1000));
  const list = [...points.values()].sort((a, b) => a.time - b.time);
  const point = list.at(-1) ?? null;
  const from = to - Math.min(WINDOW_MS, Math.max(MIN_WINDOW_MS, point ? to - list[0].time : 0));
  for (const tile of TILES) {
    const value = point || tile.value.length > 1 ? tile.value(point, frame) : "–";
    put(tile.figure, value);
    put(tile.why, tile.note ? tile.note(list) : "");
    set(tile.why, "title", tile.why.textContent || null);
    set(tile.figure, "class", `figure ${point && tile.tone ? tile.tone(point) : ""}`.trim());
    if (point?.at === newest) continue;  // the lines change each five seconds only
    const lines = tile.lines.map(([, read]) => list.map((one) => [one.time, read(one)]));
    const highest = Math.max(0, ...lines.flat().map(([, value]) => value ?? 0));
    const top = tile.top_of ?? ceiling(highest);
    tile.picture.children[1].setAttribute("d", pathOf(lines[0], from, to, top, true));
    lines.forEach((line, index) => tile.picture.children[2 + index].setAttribute("d", pathOf(line, from, to, top, false)));
    put(tile.span, `${Math.round((to - from) / 60000)} min`);
    const show = tile.show ?? figure;
    put(tile.top, `top ${show(top)}`);
    set(tile.picture, "aria-label", `${tile.head}, last ${tile.span.textContent}: now ${value}, at most ${show(highest)}`);
  }
  newest = point?.at ?? null;
}
function drawUp(frame) {
  const members = frame.endpoints.filter((one) => !one.leaving);
  const up = members.filter(isServing).length;
  put(at("up"), `${number(up)} of ${number(members.length)}`);
  set(at("up"), "class", `figure ${up === members.length ? "" : up ? "warn" : "bad"}`);
  const most = Math.max(1, ...frame.endpoints.map((one) => one.in_flight));
  put(at("bars-top"), `at most ${number(most)}`);
  at("bars").classList.toggle("dense", frame.endpoints.length > 60);
  keep(at("bars"), frame.endpoints, (one) => one.name, () => node("i"), (bar, one) => {
    bar.style.setProperty("--share", `${Math.round((100 * one.in_flight) / most)}%`);
    const tone = STATES[stateOf(one)]?.[1];
    set(bar, "class", `${tone === "bad" || tone === "warn" ? tone : ""} ${frame.endpoints.length < 40 ? "few" : ""}`.trim());
    set(bar, "title", `${plain(one.name)}: ${number(one.in_flight)} in flight, ${words(stateOf(one))}`);
  });
}
function drawFacts(frame) {
  put(at("version"), plain(frame.version));
  put(at("facts"), `${plain(frame.policy)} · up ${duration(frame.uptime_s)} · ${count(Math.max(0, frame.running - frame.queue.waiting), "request")} running · ${count(frame.client_connections, "client connection")}${frame.workers.length ? ` · ${count(frame.workers.length, "worker")} at ${frame.workers.map((one) => `${Math.round(100 * one.cpu_share)} %`).join(", ")} of a core` : ""}`);
  const warnings = [];
  if (frame.stopping) warnings.push("Stopping: no new connections soon.");
  if (!frame.settings.accepted) warnings.push("The newest settings were refused; the old ones are in force.");
  put(at("warnings"), warnings.join(" "));
  const counts = new Map();
  for (const one of frame.endpoints) counts.set(stateOf(one), (counts.get(stateOf(one)) ?? 0) + 1);
  keep(at("states"), [...counts], ([state]) => state, () => node("span"), (span, [state, many]) => {
    const [symbol, tone] = STATES[state] ?? ["?", ""];
    set(span, "class", tone);
    put(span, `${symbol} ${number(many)} ${words(state)} \u00a0 `);
  });
}

// --- Queue, changes, what was learned ------------------------------------------------------------------------------

const GROUPS = [["by_reason", "why"], ["by_flow", "flow"], ["by_model", "model"], ["by_priority", "priority"]];

function drawQueue({ queue }) {
  const oldest = queue.oldest_s === null ? "" : `, the oldest for ${figure(queue.oldest_s)} s`;
  put(at("waiting"), queue.waiting ? `${count(queue.waiting, "request")} of ${size(queue.bytes)}${oldest}.` : "No request waits.");
  set(at("waiting"), "class", queue.waiting ? "warn" : "dim");
  const groups = GROUPS.filter(([key]) => Object.keys(queue[key] ?? {}).length);
  keep(at("groups"), groups, ([key]) => key, ([, head]) => node("table", {}, node("caption", {}, head), node("tbody")), (table, [key]) => {
    const rows = Object.entries(queue[key]).sort((a, b) => b[1] - a[1]);
    keep(table.tBodies[0], rows, ([name]) => name, () => node("tr", {}, node("th", { scope: "row" }, node("bdi", { class: "clip" })), node("td", { class: "number" })), (row, [name, many]) => {
      put(row.cells[0].firstChild, key === "by_reason" ? whyOf(name) : words(name));
      put(row.cells[1], number(many));
    });
  });
}
function drawChanges(frame) {
  at("no-transitions").hidden = frame.transitions.length > 0;
  const shown = frame.transitions.slice(0, 8);
  keep(at("transitions"), shown, (one) => `${one.at} ${one.endpoint} ${one.to}`, () => node("li", {}, node("time", { class: "dim" }), " ", node("bdi"), " ", node("span"), " ", node("span", { class: "dim" })), (item, one) => {
    const [symbol, tone] = STATES[one.to] ?? ["?", ""];
    put(item.children[0], clock(one.at));
    put(item.children[1], plain(one.endpoint));
    put(item.children[2], `${symbol} ${words(one.to)}`);
    set(item.children[2], "class", tone);
    put(item.children[3], plain(one.reason));
  });
}
function drawReplicas({ replicas: found }) {
  at("replicas").hidden = found === null;
  if (found === null) return;
  const state = at("replicas-state");
  put(state, found.connected ? `This is ${plain(found.name)}, connected to ${plain(found.url)}.` : `▲ ${plain(found.url)} cannot be used, so this one balances alone: ${plain(found.problem)}`);
  set(state, "class", found.connected ? "dim" : "bad");
  at("no-replicas").hidden = found.others.length > 0;
  const table = at("replicas").querySelector("table");
  table.hidden = found.others.length === 0;
  keep(table.tBodies[0], found.others, (one) => one.id, () => node("tr", {}, node("th", { scope: "row" }, node("bdi", { class: "name" }), node("span", { class: "note" })), node("td", { class: "number" }), node("td", { class: "number" })), (row, one) => {
    const [name, flight, age] = row.children;
    put(name.children[0], plain(one.name || one.id));
    set(name, "title", `${plain(one.id)}\nlbproxy ${plain(one.version)}\nrequests in flight sent again ${count(one.resets, "time")}, ${count(one.missed, "gap")} in its batches`);
    put(name.children[1], one.complete ? "" : one.in_flight === null ? "nothing received yet" : "incomplete");
    put(flight, number(one.in_flight));
    put(age, one.batch_age_s === null ? "–" : `${number(one.batch_age_s, 1)} s`);
  });
}
function drawTokens({ tokens }) {
  const table = at("tokens");
  table.hidden = tokens.length === 0;
  at("no-tokens").hidden = tokens.length > 0;
  keep(table.tBodies[0], tokens, (one) => JSON.stringify([one.flow, one.model]), () => node("tr", {}, node("th", { scope: "row" }, node("bdi", { class: "clip" }), node("span", { class: "note" })), ...[0, 1, 2].map(() => node("td", { class: "number" }))), (row, one) => {
    const [name, ...cells] = row.children;
    const all = one.prompt_uncached + one.prompt_cached + one.completion;
    put(name.children[0], plain(one.flow));
    put(name.children[1], `${plain(one.model ?? "no model")}${one.estimated > 0.005 * all ? `, ${percent(one.estimated / all)} estimated` : ""}`);
    [one.prompt_uncached + one.prompt_cached, one.prompt_cached, one.completion].forEach((value, index) => {
      put(cells[index], brief(value));
      set(cells[index], "title", number(value));
    });
  });
}
function drawLearned({ learned: found }) {
  const rows = found === null ? [] : [
    ["prompt tokens expected in a cache", percent(learned(found, "hit_ratio"))],
    ["prefill of 1,000 tokens, ms", figure(thousand(learned(found, "prefill_ms_per_token")))],
    ["first token of an empty prompt, ms", figure(learned(found, "base_ms"))],
    ["tokens per response, mean", figure(learned(found, "answer_tokens"))],
    ["bytes per prompt token", figure(learned(found, "bytes_per_token"))],
    ["loading a LoRA adapter, ms", figure(learned(found, "adapter_load_ms"))],
    ...(found.samples.transfer_fixed_ms ? [
      ["transfer after prefill, ms", figure(found.transfer_fixed_ms)],
      ["transfer of 1,000 tokens more, ms", figure(thousand(found.transfer_ms_per_token))],
    ] : []),
  ];
  at("learned").closest("section").hidden = found === null;
  keep(at("learned"), rows.flatMap(([head, value]) => [["dt", head, head], ["dd", head, value]]), ([tag, head]) => tag + head, ([tag]) => node(tag), (element, [, , text]) => put(element, text));
}

// --- Recent requests, and one explained ----------------------------------------------------------------------------

const served = (one) => (one.fallback_from === null ? plain(one.model) : `${plain(one.model)} for ${plain(one.fallback_from)}`);
const isGood = (one) => one.outcome === "completed" && (one.status ?? 0) < 400;
const DECISIONS = [
  { head: "ended", show: (one) => clock(Date.parse(one.at) + one.duration_ms), text: true },
  { head: "request", text: true },
  { head: "model", show: served, text: true },
  { head: "endpoint", show: (one) => (one.prefill === null ? plain(one.endpoint) : `${plain(one.prefill)} → ${plain(one.endpoint)}`), text: true },
  { head: "outcome", show: (one) => `${isGood(one) ? "✓" : "✕"} ${words(one.outcome)}${isGood(one) ? "" : `, ${plain(one.status)}`}`, text: true },
  { head: "attempts", show: (one) => number(one.attempts) },
  { head: "waited, ms", show: (one) => figure(one.queue_ms) },
  { head: "observed", group: "first byte, ms", show: (one) => (one.stream ? figure(one.observed.first_byte_ms) : "–") },
  { head: "predicted", group: "first byte, ms", show: (one) => figure(one.predicted.first_byte_ms) },
  { head: "all", group: "prompt tokens", show: (one) => number(one.observed.prompt_tokens) },
  { head: "cached", group: "prompt tokens", show: (one) => number(one.observed.cached_tokens) },
  { head: "predicted", group: "prompt tokens", show: (one) => number(one.predicted.cached_tokens) },
  { head: "took, ms", show: (one) => figure(one.duration_ms) },
];

function makeDecisions() {
  at("decisions").tHead.append(groupsOf(DECISIONS), node("tr", {}, ...DECISIONS.map((one) => node("th", { scope: "col", class: one.text ? "" : "number" }, one.head))));
}
const keyOf = (column) => words(column.head).replace(/[^a-z]+/g, "-").replace(/-ms$/, "");
const headOf = (column) => (column.group ? `${column.group.replace(", ms", "")}, ${column.head}` : column.head);
function makeDecision(one) {
  const button = node("button", { type: "button", class: "id", title: plain(one.id), "aria-haspopup": "dialog" }, plain(one.id));
  button.addEventListener("click", () => explain(one.engine_id));
  return node("tr", {}, ...DECISIONS.map((column) => {
    if (!column.show) return node("th", { scope: "row", class: "request" }, button);
    const text = column.show(one);
    const cell = node("td", { class: `${column.text ? "" : "number"} ${keyOf(column)}`.trim(), "data-head": headOf(column) }, column.text ? node("bdi", { class: "clip", title: text }, text) : text);
    if (column.head === "outcome") cell.firstChild.classList.add(isGood(one) ? "good" : "bad");
    return cell;
  }));
}
function drawDecisions(frame) {
  at("no-decisions").hidden = frame.decisions.length > 0;
  keep(at("decisions").tBodies[0], frame.decisions, (one) => `${one.id} ${one.at} ${one.duration_ms}`, makeDecision, () => {});
}

async function explain(id) {
  const body = at("explanation");
  put(at("explain-title"), plain(id));
  body.replaceChildren(node("p", { class: "dim" }, "Loading"));
  at("explain").showModal();
  try {
    body.replaceChildren(...explanation(await (await ask(`decisions/${encodeURIComponent(id)}`)).json()));
  } catch (error) {
    body.replaceChildren(node("p", { class: "bad" }, error instanceof Refused ? error.message : "lbproxy does not respond."));
  }
}
function* explanation(found) {
  const first = found.prefill === null ? "" : ` after prefill on ${plain(found.prefill)}${found.prefill_ms === null ? "" : ` in ${figure(found.prefill_ms)} ms`}`;
  const where = found.endpoint ? `on ${plain(found.endpoint)}${first}` : "on no endpoint";
  yield node("p", {}, `${words(found.outcome)}, status ${plain(found.status)}, after ${figure(found.duration_ms)} ms, ${where}, ${count(found.attempts, "attempt")}. ${plain(found.method)} ${plain(found.path)}, model ${served(found)}.`);
  if (found.waited) {
    const best = found.waited.endpoint === null ? "" : `, first for ${plain(found.waited.endpoint)}`;
    yield node("p", {}, `It waited ${figure(found.queue_ms)} ms${best}: ${plain(found.waited.meaning)}.`);
  }
  for (const one of found.failed) yield node("p", { class: "warn" }, `An attempt at ${plain(one.endpoint)} failed: ${words(one.failure)}.`);
  if (found.error) yield node("p", { class: "warn" }, plain(found.error));
  if (found.left_out.length) yield notAsked(found.left_out);
  let attempt = 0;
  for (const made of found.decisions) yield* decision(made, (attempt += made.second_leg ? 0 : 1));
  if (!found.decisions.length) return;
  const rows = [["first byte, ms", "first_byte_ms"], [`cached prompt tokens${found.observed.prompt_tokens === null ? "" : ` of ${number(found.observed.prompt_tokens)}`}`, "cached_tokens"]];
  if (found.lately) yield node("p", { class: "dim" }, latelyOf(found));
  yield scrolled(["", "predicted", "observed"], rows.map(([head, key]) => [head, number(found.predicted[key], 1), found.stream || key !== "first_byte_ms" ? number(found.observed[key], 1) : "–"]));
}
/** How right the predictions for its endpoint have been; empty if nothing was predicted. */
function latelyOf({ endpoint, lately }) {
  const said = lately.first_byte_off === null ? [] : [`first bytes took ${number(lately.first_byte_off, 1)} times as long as predicted`];
  if (lately.hit_ratio !== null && lately.predicted_hit_ratio !== null) said.push(`${percent(lately.hit_ratio)} of the prompts was cached, ${percent(lately.predicted_hit_ratio)} predicted`);
  return said.length ? `Lately at ${plain(endpoint)}: ${said.join("; ")}.` : "";
}
/** A candidate, or what was chosen: an endpoint, or two of which the first computes the prompt. */
const pairOf = (one) => (one.decode_on === null ? plain(one.endpoint) : `${plain(one.endpoint)} → ${plain(one.decode_on)}`);

const notAsked = (leftOut) => node("p", { class: "dim" }, `Not asked: ${leftOut.map((one) => `${plain(one.endpoint)} (${words(one.why)})`).join(", ")}.`);

function* decision(made, attempt) {
  yield node("p", {}, node("strong", {}, `Attempt ${attempt}: ${made.second_leg ? "decode on " : ""}${pairOf(made)}`), `, by ${plain(made.policy)}: ${plain(made.because)}.`);
  const { whole, split } = made.lowest_costs;
  if (whole !== null && split !== null) yield node("p", {}, `The best pair costs ${number(split, 1)}${made.unit ? ` ${plain(made.unit)}` : ""}, the best single endpoint ${number(whole, 1)}.`);
  if (made.shown.length) {
    const every = [...new Set(made.shown.flatMap((one) => Object.keys(one.parts)))];  // whole and split requests differ
    const names = every.filter((name) => made.shown.some((one) => Math.abs(one.parts[name] ?? 0) >= 0.05));
    const cached = made.shown.some((one) => one.cached_tokens !== null);
    const rows = made.shown.map((one) => [`${one.chosen ? "✓ " : ""}${pairOf(one)}`, number(one.cost, 1), ...names.map((name) => number(one.parts[name], 1)), ...(cached ? [number(one.cached_tokens)] : [])]);
    yield scrolled([made.unit ? `costs in ${plain(made.unit)}` : "candidate", "cost", ...names.map((name) => (made.assumed.includes(name) ? `${words(name)}, assumed` : words(name))), ...(cached ? ["cached tokens"] : [])], rows, made.shown.findIndex((one) => one.chosen));
  }
  const more = made.candidates - made.shown.length;
  if (made.shown.length && more > 0) yield node("p", { class: "dim" }, `And ${number(more)} more, with the same or higher costs.`);
  if (made.left_out.length) yield notAsked(made.left_out);
}
function scrolled(heads, rows, chosen = -1) {
  const head = node("tr", {}, ...heads.map((text, index) => node("th", { scope: "col", class: index ? "number" : "" }, text)));
  const body = rows.map((cells, number) => node("tr", number === chosen ? { class: "chosen" } : {}, ...cells.map((text, index) => (index ? node("td", { class: "number" }, text) : node("th", { scope: "row" }, text)))));
  return node("div", { class: "scroll", tabindex: "0" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...body)));
}

// --- All together --------------------------------------------------------------------------------------------------

function draw(frame) {
  if (last !== null && frame.uptime_s < last.uptime_s) say("lbproxy was restarted.");
  last = frame;
  drawnAt = performance.now();
  trouble = null;
  for (const part of [drawFacts, drawUp, drawTiles, drawFleet, drawQueue, drawChanges, drawReplicas, drawTokens, drawLearned, drawDecisions]) part(frame);
  tell();
}

makeHead();
makeTiles();
makeDecisions();
takeToken();
at("forget").hidden = token === null;
at("forget").addEventListener("click", () => { setToken(null); location.reload(); });
at("filter").addEventListener("input", () => last && drawFleet(last, true));
at("attention").addEventListener("change", () => last && drawFleet(last, true));
new ResizeObserver(([bar]) => document.body.style.setProperty("--bar", `${bar.target.offsetHeight}px`)).observe(document.querySelector("header"));
setInterval(tell, 500);
live();
