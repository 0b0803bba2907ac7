/* Asking the admin API, and following its events for as long as somebody looks. */
"use strict";

const AGAIN_MS = 1000;        // between two tries
const REFUSED_MS = 5000;      // after an answer that will not change by itself
const SILENT_MS = 8000;       // frames come once a second; a connection that brings none is dead
const STALE_MS = 3500;
const HIDDEN_MS = 10000;      // a tab that nobody sees costs nothing
const MAX_FRAME = 32 << 20;

// --- Asking --------------------------------------------------------------------------------------------------------

const TOKEN = "lbproxy-admin-token";
let token = sessionStorage.getItem(TOKEN);
let asking = null;

class Refused extends Error {}

function askToken(why) {
  asking ??= new Promise((done) => {
    const dialog = at("token");
    put(at("token-why"), why);
    at("token-text").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "given" ? at("token-text").value.trim() : "";
      at("token-text").value = "";
      if (given) setToken(given);
      done(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
function setToken(value) {
  token = value;
  if (value === null) sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, value);
  at("forget").hidden = value === null;
}
/** The token that a link brought (`lbproxy dashboard`), out of the address bar at once. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return;
  history.replaceState(null, "", location.pathname + location.search);
  if (/^[!-~]{16,512}$/.test(given)) setToken(given);
}
addEventListener("hashchange", takeToken);

/** An answer of the admin API. Throws Refused with what it says, or what fetch throws. */
async function ask(path, options = {}) {
  for (;;) {
    const used = token;
    const headers = { "content-type": "application/json", ...(used === null ? {} : { authorization: `Bearer ${used}` }) };
    const answer = await fetch(`admin/${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (token !== used) continue;  // somebody has given another meanwhile
      const why = used === null ? "This needs the admin token: admin.token in the settings of lbproxy, or without one there what `lbproxy admin-token` prints. `lbproxy dashboard` prints a link with it." : "This token is wrong, or from before a restart: `lbproxy admin-token` prints the one of now.";
      if (await askToken(why)) continue;
    }
    const said = await answer.json().catch(() => null);
    throw new Refused(plain(said?.error?.message ?? `lbproxy returned ${answer.status}`));
  }
}

/** Show every frame until the connection ends or nobody looks. Throws as `ask` does. */
async function follow() {
  const control = new AbortController();
  let heard = performance.now();
  let shown = performance.now();
  const watch = setInterval(() => {
    if (!document.hidden) shown = performance.now();
    const silent = asking === null && performance.now() - heard > SILENT_MS;
    if (silent || performance.now() - shown > HIDDEN_MS) control.abort();
  }, 1000);
  try {
    const answer = await ask("events", { signal: control.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard = performance.now();
      text += value;
      const end = text.lastIndexOf("\n\n");
      if (end >= 0) {
        const data = text.slice(0, end).split("\n").findLast((line) => line.startsWith("data: "));
        text = text.slice(end + 2);
        if (data !== undefined && !document.hidden) draw(JSON.parse(data.slice(6)));
      }
      if (text.length > MAX_FRAME) throw new Refused("a frame is too large");
    }
  } finally {
    clearInterval(watch);
    control.abort();
  }
}

let wake = () => {};
async function live() {
  for (;;) {
    let pause = AGAIN_MS;
    try {
      await follow();
      trouble = "the connection ended";
    } catch (error) {
      if (error instanceof Refused) pause = REFUSED_MS;
      trouble = error instanceof Refused ? error.message : "lbproxy does not respond";
    }
    await new Promise((done) => {
      wake = done;
      if (!document.hidden) setTimeout(done, pause * (0.75 + Math.random() / 2));
    });
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) wake(); });

// --- Whether it is true --------------------------------------------------------------------------------------------

let drawnAt = null;  // performance.now() of the last frame
let trouble = null;  // why there is none since
let last = null;

function tell() {
  const age = drawnAt === null ? null : performance.now() - drawnAt;
  const fresh = age !== null && age < STALE_MS;
  const stale = !fresh && (age !== null || trouble !== null);
  set(at("connection"), "class", `pill ${fresh ? "live" : stale ? "stale" : "waiting"}`);
  const text = fresh ? "Live" : !stale ? "Connecting" : `${age === null ? "Nothing yet" : "Stale"}: ${trouble ?? "no data from lbproxy"}; reconnecting`;
  put(at("connection-text"), text);
  put(at("age"), stale && age !== null ? `, ${duration(age / 1000)} old` : "");
  document.body.classList.toggle("stale", stale);
  title(stale);
}
function title(stale) {
  if (last === null) return;
  const members = last.endpoints.filter((one) => !one.leaving);
  const text = `${members.filter(isServing).length}/${members.length} up · lbproxy`;
  if (document.title !== (stale ? `stale: ${text}` : text)) document.title = stale ? `stale: ${text}` : text;
}
