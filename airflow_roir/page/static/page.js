// What both pages stand on: elements, figures as text, Airflow's theme, links out of the frame, requests, polling.

/** Make an element. `of`: attributes; `class`, `text` and `on…` have their own meaning. Text never becomes HTML. */
export function el(name, of = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(of)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

/** Write a text only if it differs, so that nothing is painted or read aloud again. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set an attribute only if it differs. */
export function mark(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Switch a button off, or on again. It keeps the focus, and a reader of the page hears of it and why; a click does nothing.
 */
export function off(button, isOff, why = null) {
  mark(button, "aria-disabled", isOff ? "true" : null);
  mark(button, "title", isOff ? why : null);
}

addEventListener(
  "click",
  (event) => {
    if (!event.target.closest?.("[aria-disabled=true]")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  },
  true,
);

/** Have `change` done. If it takes the focus away from within `node`, the first of `next()` that is shown gets it. */
export function holdFocus(node, change, next) {
  const held = node.contains(document.activeElement) ? document.activeElement : null;
  change();
  // It was moved, or is gone.
  if (held) (held.checkVisibility() ? held : next().find((one) => one.checkVisibility()))?.focus();
}

// --- figures

const whole = new Intl.NumberFormat("en");
export const DASH = "–";
export const count = (value) => (value === null || value === undefined ? DASH : whole.format(Math.round(value)));
export const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;

export function short(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  for (const [limit, unit, name] of [[1e9, 1e9, " bn"], [1e6, 1e6, " M"], [1e4, 1e3, " k"]]) {
    if (size >= limit) return `${(value / unit).toFixed(size >= 100 * unit ? 0 : 1)}${name}`;
  }
  return whole.format(Math.round(value));
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit === 0 || rest >= 100 ? rest.toFixed(0) : rest.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  const s = Math.max(0, seconds);
  if (s < 1) return "under 1 s";
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 90 * 60) {
    const all = Math.round(s);
    return s < 600 && all % 60 ? `${Math.floor(all / 60)} min ${all % 60} s` : `${Math.round(s / 60)} min`;
  }
  const minutes = Math.round(s / 60);
  if (minutes < 48 * 60) return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
  return many(Math.round(s / 86400), "day");
}

export const share = (value) => (value === null || value === undefined ? DASH : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);

/** The time zone of Airflow's UI: its user's choice, kept by Airflow, else the browser's; UTC if neither can be read. */
function zone() {
  try {
    const kept = localStorage.getItem("timezone");
    const name = kept === null ? Intl.DateTimeFormat().resolvedOptions().timeZone : JSON.parse(kept);
    return new Intl.DateTimeFormat("en-GB", { timeZone: name }).resolvedOptions().timeZone;
  } catch {
    return "UTC";
  }
}

export function clock(moment, withDay = false) {
  const date = moment instanceof Date ? moment : new Date(moment);
  if (Number.isNaN(date.getTime())) return DASH;
  const timeZone = zone();
  const day = (of) => of.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone });
  const time = date.toLocaleTimeString("en-GB", { timeZone });
  return day(date) === day(new Date()) && !withDay ? time : `${day(date)}, ${time.slice(0, 5)}`;
}

/** The name of the zone of these times: `UTC`, `CET`, `GMT-5`. */
export function zoneName(moment) {
  const date = new Date(moment);
  if (Number.isNaN(date.getTime())) return "";
  const parts = new Intl.DateTimeFormat("en-GB", { timeZone: zone(), timeZoneName: "short" }).formatToParts(date);
  return parts.find((one) => one.type === "timeZoneName").value;
}

/** A moment with its zone: `09:41:10 UTC`. */
export const zoned = (moment, withDay = false) => `${clock(moment, withDay)} ${zoneName(moment)}`.trim();

/** A moment with its age: `09:41:10 UTC, 11 min ago`. */
export const since = (moment) => `${zoned(moment)}, ${duration((Date.now() - new Date(moment)) / 1000)} ago`;

export const time = (moment) => el("time", { datetime: moment, text: zoned(moment) });

// --- Airflow's theme

function wantsDark() {
  try {
    if (window.parent !== window) {
      const root = window.parent.document.documentElement;
      if (root.classList.contains("dark") || root.dataset.theme === "dark") return true;
      if (root.classList.contains("light") || root.dataset.theme === "light") return false;
    }
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") return kept === "dark";
  } catch {
    // Framed by a page that doesn't let us look: as the system has it.
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function followTheme() {
  const show = () => mark(document.documentElement, "data-theme", wantsDark() ? "dark" : "light");
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  addEventListener("storage", show);
  try {
    if (window.parent !== window) {
      new MutationObserver(show).observe(window.parent.document.documentElement, { attributes: true, attributeFilter: ["class", "data-theme"] });
    }
  } catch {
    // As above.
  }
}

// --- links. The frame may open nothing by itself, so Airflow's own page does it.

/** Where Airflow itself is: this page lies at <Airflow>/roir/…. */
export const airflow = new URL("../", location.href);

/** An id as a part of an address of Airflow's UI, written as Airflow does: else it doesn't mark its tab as the open one. */
export const part = (id) => encodeURIComponent(id).replaceAll("%3A", ":").replaceAll("%2B", "+");

export function link(text, address, of = {}) {
  const url = new URL(address, airflow);
  if (url.protocol !== "http:" && url.protocol !== "https:") return el("span", { text });
  const away = url.origin !== airflow.origin;
  return el("a", {
    ...of,
    href: url.href,
    text,
    rel: "noopener noreferrer",
    onclick: (event) => {
      if (window.parent === window) return;
      event.preventDefault();
      const outside = window.parent.document.createElement("a");
      outside.href = url.href;
      outside.rel = "noopener noreferrer";
      if (away || event.ctrlKey || event.metaKey) outside.target = "_blank";
      window.parent.document.body.append(outside);
      outside.click();
      outside.remove();
    },
  });
}

/**
 * Offer a way past Airflow's own stops, seventy of them: its page's first stop is a link to this page, which is seen
 * while it has the focus.
 */
export function offerSkip(name) {
  if (window.parent === window) return;
  const outside = window.parent.document;
  const id = "roir-skip";
  const seen = "position:fixed;top:8px;left:8px;z-index:9999;padding:8px 14px;border-radius:6px;background:#fff;color:#111;outline:2px solid #1a56db";
  const unseen = "position:fixed;top:0;left:0;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap";
  const to = Object.assign(outside.createElement("a"), { id, href: `#${id}`, textContent: `Skip to ${name}` });
  to.style.cssText = unseen;
  to.addEventListener("focus", () => (to.style.cssText = seen));
  to.addEventListener("blur", () => (to.style.cssText = unseen));
  to.addEventListener("click", (event) => {
    event.preventDefault();
    window.focus();
    (document.querySelector("h1[tabindex]") ?? document.getElementById("main")).focus();
  });
  outside.getElementById(id)?.remove();
  outside.body.prepend(to);
  addEventListener("pagehide", () => to.remove());
}

/** How long Airflow's menu may take to open, in milliseconds. */
const MENU_MS = 2000;

/**
 * Open Airflow's own form with the values of the run that is shown, as its button Trigger does. True if it is open: this
 * Airflow may have another button, or the page no frame.
 */
export async function openForm() {
  if (window.parent === window) return false;
  const outside = window.parent.document;
  const button = outside.querySelector("[data-testid=trigger-dag-button]:not([disabled])");
  // Without a menu, it is the form of the DAG, with no values.
  if (button?.getAttribute("aria-haspopup") !== "menu") return false;
  button.click();
  for (let waited = 0; waited < MENU_MS; waited += 50) {
    const item = outside.querySelector("[role=menuitem][data-value=triggerWithConfig]");
    if (item) {
      item.click();
      return true;
    }
    await new Promise((done) => setTimeout(done, 50));
  }
  return false;
}

// --- requests

export class Refused extends Error {
  /** said: the answer's own words; "" if it had none. */
  constructor(status, text, said = "") {
    super(text);
    Object.assign(this, { status, said });
  }
}

async function textOf(response) {
  try {
    const { detail } = await response.json();
    if (typeof detail === "string") return detail;
    if (Array.isArray(detail)) return detail.map((one) => one.msg).join("; ");
  } catch {
    // No JSON: a proxy, perhaps.
  }
  return "";
}

const MEANING = {
  401: "You are signed out. Sign in again, then reload the page.",
  403: "Your Airflow user has no right to do this.",
  502: "Airflow's server can't be reached.",
  504: "Airflow's server doesn't answer.",
};

/** GET JSON, once. Raises Refused, with words for the user. */
export async function get(address) {
  let response;
  try {
    response = await fetch(address, { credentials: "same-origin" });
  } catch {
    throw new Refused(0, "Airflow's server can't be reached.");
  }
  if (!response.ok) throw new Refused(response.status, (await textOf(response)) || (MEANING[response.status] ?? `Refused (${response.status}).`));
  return response.json();
}

/** POST JSON; the answer's JSON. Raises Refused, with words for the user. */
export async function send(address, body) {
  // A text is JSON already.
  let response;
  try {
    response = await fetch(address, {
      method: "POST",
      // It gets there, too, when the page goes away.
      keepalive: true,
      credentials: "same-origin",
      headers: { "Content-Type": "application/json", "X-Roir": "1" },
      body: typeof body === "string" ? body : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, "Airflow's server can't be reached. Nothing was changed, as far as this page knows.");
  }
  if (!response.ok) {
    const said = await textOf(response);
    throw new Refused(response.status, response.status === 403 || !said ? (MEANING[response.status] ?? `Refused (${response.status}).`) : said);
  }
  return response.json();
}

/**
 * Trigger a DAG by Airflow's own API, with the user's own rights; the run. Raises Refused.
 *
 * conf: an object, or JSON text, which is sent as it is: this script would round its numbers.
 */
export function trigger(dag, conf) {
  const text = typeof conf === "string" ? conf : JSON.stringify(conf);
  return send(`../api/v2/dags/${part(dag)}/dagRuns`, `{"logical_date": null, "conf": ${text}}`);
}

/**
 * Ask again and again: `address()` gives where, `every(content)` the seconds until the next time, `show(content)` draws,
 * `old(reason, since, gone)` says that what is drawn is from `since` (a Date, or null) and why no newer is to be had;
 * gone: it doesn't ask again by itself.
 */
export class Poll {
  constructor({ address, every, show, old }) {
    Object.assign(this, { address, every, show, old });
    this.tag = null;
    this.where = null;
    this.content = null;
    this.good = null;
    this.failures = 0;
    this.timer = null;
    this.turn = 0;
    document.addEventListener("visibilitychange", () => document.hidden || this.now());
  }

  /** Ask at once. An answer that is under way doesn't count any more. */
  now() {
    clearTimeout(this.timer);
    this.turn += 1;
    this.ask(this.turn);
  }

  async ask(turn) {
    let wait;
    const controller = new AbortController();
    const limit = setTimeout(() => controller.abort(), 15000);
    try {
      const where = this.address();
      const headers = this.tag && where === this.where ? { "If-None-Match": this.tag } : {};
      const response = await fetch(where, { headers, credentials: "same-origin", cache: "no-store", signal: controller.signal });
      const content = response.status === 304 ? this.content : response.ok ? await response.json() : null;
      if (turn !== this.turn) return;
      if (content === null) {
        const said = await textOf(response);
        throw new Refused(response.status, MEANING[response.status] ?? (said || `Airflow's server answers ${response.status}.`), said);
      }
      this.tag = response.headers.get("ETag");
      this.where = where;
      this.content = content;
      this.good = new Date();
      this.failures = 0;
      this.show(content);
      wait = this.every(content) * (document.hidden ? 10 : 1);
    } catch (error) {
      if (turn !== this.turn) return;
      this.failures += 1;
      // What the page is about is gone, and won't come back. A proxy's 404 says nothing.
      const gone = error instanceof Refused && error.status === 404 && error.said !== "";
      this.old(error instanceof Refused ? error.message : "Airflow's server can't be reached.", this.good, gone);
      if (gone) return;
      if (!(error instanceof Refused || error instanceof TypeError || error.name === "AbortError")) console.error(error);
      wait = Math.min(2 ** Math.min(this.failures, 4), 15) * (document.hidden ? 4 : 1);
    } finally {
      clearTimeout(limit);
    }
    this.timer = setTimeout(() => this.ask(turn), wait * 1000);
  }
}

/** The banner that says since when the figures are old. */
export function banner(main) {
  // The age changes at each try: only the reason is read aloud.
  const why = el("span", { role: "alert" });
  const age = el("span");
  const node = el("section", { class: "banner", "aria-label": "Old figures", hidden: true }, why, age);
  main.before(node);
  return {
    old(reason, moment, gone = false) {
      put(why, (/[.!?]$/.test(reason) ? reason : `${reason}.`).replace(/^./, (first) => first.toUpperCase()));
      put(age, `${moment ? ` These figures are from ${since(moment)}.` : ""}${gone ? "" : " Trying again …"}`);
      node.hidden = false;
      main.classList.add("stale");
    },
    fresh() {
      node.hidden = true;
      main.classList.remove("stale");
    },
  };
}

let unsaid = [];

/** Say something to a screen reader, once; together with what else is to be said now. */
export function say(text) {
  unsaid.push(text);
  if (unsaid.length > 1) return;
  queueMicrotask(() => {
    put(document.getElementById("news"), unsaid.join(". "));
    unsaid = [];
  });
}

let questions = 0;

/** Keep the focus within a question: from its last part Tab goes to the first. */
function turn(event, node) {
  const parts = [...node.querySelectorAll("input, button")];
  const edge = event.shiftKey ? parts[0] : parts.at(-1);
  if (document.activeElement !== edge) return;
  event.preventDefault();
  (event.shiftKey ? parts.at(-1) : parts[0]).focus();
}

/**
 * A question within the page: the frame has no dialogs. Returns the node; `yes(value)` gets the text of its field.
 *
 * With a field the question stays until `yes` is done. If that gives a text, the value is refused: the text is shown
 * beside the value, which the user can correct. late: called with the text if the user has closed the question meanwhile.
 */
export function question({ title, text, field, value = "", yes, verb, danger = false, close, late = () => {} }) {
  // Several may be open at a time.
  const id = `question-${(questions += 1)}`;
  const wrong = field ? el("p", { class: "wrong", role: "alert", id: `${id}-wrong` }) : null;
  const input = field ? el("input", { type: "text", maxlength: 500, id: `${id}-field`, "aria-describedby": `${id}-wrong`, autocomplete: "off", value }) : null;
  const sure = el("button", { type: "submit", class: danger ? "danger" : "main", text: verb });
  const submit = (event) => {
    event.preventDefault();
    if (input) answer();
    else {
      close();
      yes("");
    }
  };
  // A form itself may not be a dialog.
  const node = el(
    "div",
    {
      class: `question${danger ? " of-danger" : ""}`,
      role: "alertdialog",
      "aria-labelledby": `${id}-title`,
      "aria-describedby": `${id}-text`,
      onkeydown: (event) => {
        if (event.key === "Escape") close();
        if (event.key === "Tab") turn(event, node);
      },
    },
    el("h2", { id: `${id}-title`, text: title }),
    el("p", { id: `${id}-text`, text }),
    el(
      "form",
      { onsubmit: submit },
      input && el("label", { for: `${id}-field`, text: field }),
      input,
      wrong,
      el("div", { class: "row" }, sure, el("button", { type: "button", text: "Cancel", onclick: close })),
    ),
  );

  async function answer() {
    if (sure.hasAttribute("aria-disabled")) return;
    off(sure, true);
    // The same text is announced again.
    put(wrong, "");
    mark(input, "aria-invalid", null);
    const refusal = await yes(input.value.trim());
    off(sure, false);
    if (!node.isConnected) {
      if (refusal) late(refusal);
    } else if (refusal) {
      put(wrong, refusal);
      mark(input, "aria-invalid", "true");
      input.focus();
    } else close();
  }

  requestAnimationFrame(() => (input ?? node.querySelector("button[type=button]")).focus());
  return node;
}
