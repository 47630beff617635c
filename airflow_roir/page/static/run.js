// The page Index build: one operation of one run, live.

import { Duplicates } from "./duplicates.js";
import { Chart, Delta, Phases, Pieces, keep } from "./draw.js";
import { Failures } from "./failures.js";
import { NOTHING, Nothing } from "./nothing.js";
import { Shards } from "./shards.js";
import { Throttle } from "./throttle.js";
import { Values } from "./values.js";
import { DASH, Poll, banner, clock, count, duration, el, followTheme, holdFocus, link, many, mark, off, offerSkip, part, put, question, say, send, short, trigger, zoned, zoneName } from "./page.js";

followTheme();
offerSkip("Index build");
const asked = new URLSearchParams(location.search);
const main = document.getElementById("main");
const stale = banner(main);
// {connection, operation} that the user chose, where the run has several.
let chosen = null;
let page = null;

const KIND = { create: "First build", rebuild: "Rebuild", verify: "Verification", compact: "Compaction" };
const LEFT = ["abandoned", "paused", "pausing"];
const OVER = ["completed", "failed", "aborted"];
// More operations of a run are a list to choose from.
const MOST_TABS = 6;

function address(path, more = {}) {
  const of = new URLSearchParams({ dag_id: asked.get("dag_id") ?? "", run_id: asked.get("run_id") ?? "", ...more });
  return `api/run${path}?${of}`;
}

const poll = new Poll({
  address: () => {
    const task_id = asked.get("task_id") ?? "";
    const kind = task_id ? { kind: /(^|\.)verify/.exec(task_id) ? "verify" : /(^|\.)compact/.exec(task_id) ? "compact" : "build" } : {};
    // Of a mapped task each instance has an operation of its own.
    const task = asked.get("task_id") ? { task_id: asked.get("task_id"), map_index: /^\d+$/.test(asked.get("map_index") ?? "") ? asked.get("map_index") : "-1" } : {};
    return address("", { ...kind, ...task, ...(chosen ?? {}) });
  },
  every: (content) => {
    const status = content.progress?.status;
    if (status === "running" || status === "pausing" || status === "aborting") return 1;
    if (status === "paused" || status === "abandoned") return 3;
    // A failing task's message may come a moment after its end.
    const fails = (content.failures ?? []).some((failure) => failure.at && Date.now() - Date.parse(failure.at) < 60000);
    return fails || content.run.state === "running" || content.run.state === "queued" ? 3 : 30;
  },
  show: (content) => {
    stale.fresh();
    mark(main, "aria-busy", null);
    if (!content.progress && content.troubles.length > 0 && page instanceof Build) {
      // The run has ended, and its database can't be read now: the figures are the last ones.
      stale.old(content.troubles.at(-1), page.shownAt, true);
      page.failures.show(content);
      return;
    }
    // Operations of two databases may have one number: an open question must not be answered for the other.
    const key = content.progress ? JSON.stringify([content.chosen.connection, content.progress.operation_id]) : NOTHING;
    const had = main.contains(document.activeElement);
    const isNew = page?.key !== key;
    if (isNew) {
      page = content.progress ? new Build(key) : new Nothing();
      main.replaceChildren(page.node);
    }
    page.show(content);
    if (isNew && had) page.takeFocus();
  },
  old: (reason, since, gone) => {
    mark(main, "aria-busy", null);
    if (!page) main.replaceChildren();
    stale.old(reason, since, gone);
  },
});

class Tile {
  constructor(name) {
    this.value = el("strong");
    this.more = el("small");
    this.node = el("div", { class: "tile" }, el("span", { text: name }), this.value, this.more);
  }

  show(value, more = "") {
    put(this.value, value);
    put(this.more, more);
    this.node.hidden = value === DASH && !more;
  }
}

class Build {
  constructor(key) {
    this.key = key;
    this.spoken = null;
    this.busy = false;
    this.wanted = null;
    this.phases = new Phases();
    this.pieces = new Pieces();
    this.chart = new Chart();
    this.delta = new Delta();
    this.shards = new Shards();
    this.throttle = new Throttle(() => this.askLimits());
    this.duplicates = new Duplicates((more) => address("/duplicates", { connection: this.content.chosen.connection, operation: String(this.content.chosen.operation), ...more }));
    this.tiles = Object.fromEntries(["Rows", "Rows/s now", "Time worked", "Workers"].map((name) => [name, new Tile(name)]));
    this.choice = el("select", { "aria-label": "Operation", onchange: () => this.choose(...this.choice.value.split(/ (.*)/s)) });
    this.buttons = el("div", { class: "tabs" });
    this.tabs = el("nav", { class: "operations", "aria-label": "Operations of this run", hidden: true }, this.choice, this.buttons);
    this.eyebrow = el("p", { class: "eyebrow" });
    this.name = el("h1", { tabindex: -1 });
    this.source = el("p", { class: "source" });
    this.chip = el("span", { class: "chip" });
    this.asks = el("div", { class: "asks" });
    this.said = el("p", { class: "said", role: "status" });
    this.percent = el("strong", { class: "percent" });
    this.left = el("p", { class: "left" });
    this.fill = el("i");
    this.meter = el("div", { class: "meter", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Work done" }, this.fill);
    this.held = el("p", { class: "held", hidden: true });
    this.continued = el("p", { class: "note info", hidden: true });
    this.notes = el("div", { class: "notes" });
    this.pauseButton = el("button", { type: "button", class: "main", text: "Pause", onclick: () => this.askPause() });
    this.resumeButton = el("button", { type: "button", class: "main", text: "Resume", onclick: () => this.change("resume") });
    this.continueButton = el("button", { type: "button", class: "main", text: "Continue", onclick: () => this.goOn() });
    this.abortButton = el("button", { type: "button", class: "quiet-danger", text: "Abort", onclick: () => this.askAbort() });
    this.cleanUpButton = el("button", { type: "button", text: "Clean up now", onclick: () => this.cleanUp() });
    this.fewer = el("button", { type: "button", "aria-label": "One worker fewer", text: "−", onclick: () => this.step(-1) });
    this.more = el("button", { type: "button", "aria-label": "One worker more", text: "+", onclick: () => this.step(1) });
    this.number = el("output", { "aria-label": "Workers wanted" });
    this.stepper = el("div", { class: "stepper", role: "group", "aria-label": "Number of workers" }, this.fewer, this.number, this.more);
    this.rateButton = el("button", { type: "button", text: "Rate limit", onclick: () => this.askRate() });
    this.limitButton = el("button", { type: "button", text: "Throttle", onclick: () => this.askLimits() });
    this.workers = el("tbody");
    this.noWorkers = el("p", { class: "faint", text: "No worker is active." });
    this.pauses = el("ol", { class: "list" });
    this.errors = el("ol", { class: "list" });
    this.events = el("tbody");
    this.queries = el("ol", { class: "list" });
    this.links = el("p", { class: "links" });
    this.failures = new Failures();
    this.values = new Values();
    this.shownAt = null;
    this.node = this.frame();
  }

  frame() {
    return el(
      "article",
      {},
      this.tabs,
      el(
        "header",
        { class: "head" },
        el("div", { class: "title" }, this.eyebrow, el("div", { class: "row" }, this.name, this.chip), this.source),
        (this.controls = el("div", { class: "controls" }, this.pauseButton, this.resumeButton, this.continueButton, this.limitButton, this.abortButton, this.cleanUpButton)),
      ),
      this.said,
      this.asks,
      this.failures.node,
      el(
        "section",
        { class: "panel hero", "aria-label": "Progress" },
        el("div", { class: "row ends" }, this.percent, this.left),
        this.meter,
        this.phases.node,
      ),
      this.held,
      this.notes,
      this.continued,
      (this.queryPanel = el("section", { class: "panel", hidden: true }, el("header", {}, el("h2", { text: "Query it" })), this.queries)),
      this.duplicates.node,
      el("section", { class: "tiles", "aria-label": "Figures" }, ...Object.values(this.tiles).map((tile) => tile.node)),
      this.throttle.node,
      this.shards.node,
      el(
        "div",
        { class: "columns" },
        el("div", {}, this.pieces.node, this.chart.node),
        el(
          "div",
          {},
          (this.workerPanel = el(
            "section",
            { class: "panel" },
            el("header", {}, el("h2", { text: "Workers" }), el("div", { class: "controls" }, this.stepper, this.rateButton)),
            (this.table = el(
              "table",
              { class: "of-workers" },
              el("caption", { class: "unseen", text: "Workers, what each holds and does" }),
              el("thead", {}, el("tr", {}, ...["Worker", "Holds", "Does"].map((text) => el("th", { scope: "col", text })))),
              this.workers,
            )),
            this.noWorkers,
          )),
          this.delta.node,
          (this.errorPanel = el("section", { class: "panel", hidden: true }, el("header", {}, el("h2", { text: "Errors" })), this.errors)),
          (this.pausePanel = el("section", { class: "panel", hidden: true }, el("header", {}, el("h2", { text: "Pauses" })), this.pauses)),
        ),
      ),
      (this.history = el(
        "details",
        { class: "panel" },
        el("summary", { text: "History" }),
        el("table", {}, el("caption", { class: "unseen", text: "The last events, newest first" }), el("thead", {}, el("tr", {}, ...["When", "Who", "What"].map((text) => el("th", { scope: "col", text })))), this.events),
      )),
      this.values.node,
      this.links,
    );
  }

  show(content) {
    holdFocus(this.node, () => this.draw(content), () => this.nextFocus());
  }

  /** What can be done now; else the name. */
  nextFocus() {
    return [...this.controls.children, this.name];
  }

  /** The user has chosen another operation, or it is another one now. */
  takeFocus() {
    const tab = this.choice.hidden ? this.buttons.querySelector("[aria-current]") : this.choice;
    (chosen && tab?.checkVisibility() ? tab : this.name).focus();
  }

  draw(content) {
    this.content = content;
    this.shownAt = new Date();
    const { progress: p, run, chosen: one } = content;
    // The run that the user has triggered takes the operation up a moment later.
    if (this.continuedBy && (content.continued_by || !LEFT.includes(p.status))) this.continuedBy = null;
    if (this.continuedBy) content.continues = content.again = null;
    this.showTabs(content);
    this.failures.show(content);
    this.values.show(run.values);
    put(this.eyebrow, p.census ? "Census for" : `${KIND[p.kind] ?? "Operation"} of${p.unique && p.kind !== "verify" && p.kind !== "compact" ? " unique index" : ""}`);
    put(this.name, p.index);
    put(this.source, `${p.definition} · connection ${one.connection} · operation ${p.operation_id}`);
    const { name: state, word, note } = this.continuedBy ? { name: "undriven", word: "Continued", note: `Continued by run ${this.continuedBy}` } : p.state;
    mark(this.chip, "data-status", state);
    put(this.chip, word);
    put(this.percent, `${p.percent_complete.toFixed(1)} %`);
    mark(this.meter, "aria-valuenow", Math.floor(p.percent_complete));
    mark(this.meter, "aria-valuetext", `${Math.floor(p.percent_complete)} %, ${word}`);
    mark(this.meter, "data-status", state);
    this.fill.style.width = `${p.percent_complete}%`;
    this.phases.show(p.phases ?? []);
    this.queryPanel.hidden = !p.queries?.length;
    keep(this.queries, p.queries ?? [], () => el("li", {}, el("code")), (item, text) => put(item.firstChild, text));
    put(this.left, note);
    this.showContinued(content);
    this.showHeld(content);
    this.showTiles(p);
    this.pieces.show(p.bars, ["paused", "queued", "undriven", "abandoned"].includes(state) && !p.workers?.alive);
    this.chart.show(p.samples, p.rows_per_second);
    this.delta.show(p.delta);
    this.throttle.show(p, this.mayThrottle(content));
    this.shards.show(p);
    this.workerPanel.hidden = OVER.includes(p.status) || !(p.workers?.list?.length || this.mayThrottle(content));
    this.showWorkers(p);
    this.showControls(content);
    this.showLists(p);
    this.duplicates.show(p);
    this.showLinks(content);
    const words = `${word}, phase ${p.phases?.find((one) => one.state === "now")?.name ?? p.phase}`;
    if (this.spoken !== words) {
      say(`${p.index}: ${words}`);
      this.spoken = words;
    }
  }

  showTabs({ operations, chosen: one }) {
    this.tabs.hidden = operations.length < 2;
    const asList = operations.length > MOST_TABS;
    this.choice.hidden = !asList;
    keep(this.choice, asList ? operations : [], () => el("option"), (option, item) => {
      put(option, `${item.index} · ${KIND[item.kind].toLowerCase()} · ${item.status}`);
      option.value = `${item.operation} ${item.connection}`;
    });
    this.choice.value = `${one.operation} ${one.connection}`;
    keep(
      this.buttons,
      operations.length < 2 || asList ? [] : operations,
      () => el("button", { type: "button" }),
      (button, item) => {
        put(button, `${item.index} · ${KIND[item.kind].toLowerCase()}`);
        mark(button, "aria-current", item.operation === one.operation && item.connection === one.connection ? "true" : null);
        button.onclick = () => this.choose(String(item.operation), item.connection);
      },
    );
  }

  choose(operation, connection) {
    chosen = { connection, operation };
    poll.now();
  }

  /** The run or command that has continued the operation of this run, which has ended. */
  showContinued({ continued_by: by }) {
    this.continued.hidden = !by;
    const key = JSON.stringify(by ?? null);
    if (this.continued.dataset.key === key) return;
    mark(this.continued, "data-key", key);
    if (by) this.continued.replaceChildren(...(by.name ? [`Continued by ${by.name}.`] : [`Continued by run ${by.run_id} of ${by.dag_id}. `, link("See its run", runPage(by))]));
  }

  showHeld({ progress: p, run, paused_by_switch: bySwitch }) {
    const notes = [];
    if (run.switch_off && !OVER.includes(p.status)) {
      notes.push(["warn", `Turn the switch of ${run.dag_id} on${bySwitch ? " to resume" : ""}: while it is off, Airflow starts no task of this run.`]);
    }
    if (bySwitch && !run.switch_off && p.status === "paused" && run.state === "running") {
      notes.push(["info", `The switch of ${run.dag_id} is on: the task continues within half a minute.`]);
    }
    const held = p.held_up;
    if (p.notice && p.notice !== held?.text) notes.push(["warn", p.notice]);
    if (p.long_pause) notes.push(["warn", p.long_pause]);
    if (p.worth && !OVER.includes(p.status)) notes.push(["info", `Will it pay? ${p.worth}.`]);
    const text = held && held.by !== "nothing" && p.status !== "pausing" && !OVER.includes(p.status) ? held.text || held.by : "";
    this.held.hidden = !text || Boolean(this.continuedBy);
    mark(this.held, "data-by", held?.by ?? null);
    mark(this.held, "data-paced", held?.by === "throttled" && !text.startsWith("throttled: ") ? "true" : null);
    put(this.held, text.replace(/^throttled: /, ""));
    keep(this.notes, notes, () => el("p"), (note, [kind, words]) => {
      note.className = `note ${kind}`;
      put(note, words);
    });
  }

  showTiles(p) {
    const t = this.tiles;
    t.Rows.show(short(p.rows), p.rows_estimate ? `of about ${short(p.rows_estimate)}` : "");
    t["Rows/s now"].show(p.workers?.alive ? short(p.rows_per_second_now) : DASH, p.rows_per_second === null ? "" : `${short(p.rows_per_second)} on average`);
    t["Time worked"].show(duration(p.total_execution_time), "without pauses");
    t.Workers.show(`${count(p.workers?.alive)} of ${count(p.workers?.wanted)}`, p.max_rows_per_second ? `limit ${short(p.max_rows_per_second)} rows/s` : "no rate limit");
    t.Workers.node.hidden = OVER.includes(p.status);
  }

  showWorkers(p) {
    const list = p.workers?.list ?? [];
    const does = { lock: "waits for a lock", idle: { "rate limit": "waits for the rate limit", throttled: "waits: throttled" }[p.held_up?.by] ?? "idle" };
    this.table.hidden = list.length === 0;
    this.noWorkers.hidden = list.length > 0;
    keep(
      this.workers,
      list,
      () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td")),
      (row, one) => {
        put(row.children[0], String(one.worker));
        put(row.children[1], one.holds ?? DASH);
        put(row.children[2], `${does[one.state] ?? one.state ?? DASH}${one.waits_for ? `: ${one.waits_for}` : ""}`);
        mark(row, "data-state", one.state);
      },
    );
  }

  showControls({ progress: p, may_change: may, may_clean_up: mayCleanUp, chosen: one, paused_by_switch: bySwitch, run }) {
    const can = may && one.drives;
    // If the run has ended, a resume alone lifts the pause, and no run continues the operation.
    const paused = p.status === "paused" || p.status === "pausing";
    const goesOn = Boolean(this.content.continues) && (!paused || can);
    // An aborted operation has no driver any more; who may clean up need not be who may edit the run.
    this.cleanUpButton.hidden = p.status !== "aborting" || !mayCleanUp;
    this.controls.hidden = !can && !goesOn && this.cleanUpButton.hidden;
    this.pauseButton.hidden = !can || p.status !== "running";
    this.resumeButton.hidden = !can || !paused || goesOn || Boolean(this.continuedBy);
    this.continueButton.hidden = !goesOn;
    // The switch that paused it would pause it again.
    const bySwitchStill = Boolean(bySwitch && run.switch_off);
    off(this.resumeButton, this.busy || bySwitchStill, bySwitchStill ? `Turn the switch of ${run.dag_id} on first` : null);
    this.abortButton.hidden = !can || ["completed", "aborting", "aborted"].includes(p.status);
    for (const button of [this.pauseButton, this.continueButton, this.abortButton, this.cleanUpButton, this.rateButton, this.limitButton, this.throttle.edit]) off(button, this.busy);
    const live = this.mayThrottle(this.content);
    // Where there is a throttle, its panel has the button.
    this.limitButton.hidden = !live || Boolean(p.governor);
    this.fewer.hidden = this.more.hidden = this.rateButton.hidden = !live;
    const wanted = this.wanted ?? p.workers?.wanted ?? null;
    put(this.number, wanted === null ? DASH : many(wanted, "worker"));
    mark(this.number, "aria-busy", this.wanted === null ? null : "true");
    off(this.fewer, wanted === null || wanted <= 1);
    off(this.more, wanted === null || wanted >= 256);
  }

  showLists(p) {
    const pauses = [...(p.pauses ?? [])].sort((a, b) => b.at.localeCompare(a.at));
    this.pausePanel.hidden = pauses.length === 0;
    keep(
      this.pauses,
      pauses,
      () => el("li", {}, el("b"), el("span"), el("small")),
      (item, pause) => {
        put(item.children[0], pause.by ?? "unknown");
        put(item.children[1], pause.why ?? "");
        put(item.children[2], `${clock(pause.at)} ${pause.until ? `to ${zoned(pause.until)}` : `${zoneName(pause.at)} until now`}`);
      },
    );
    const errors = p.errors ?? [];
    this.errorPanel.hidden = errors.length === 0;
    keep(
      this.errors,
      errors,
      () => el("li", {}, el("span", { class: "wrong" }), el("span"), el("small")),
      (item, error) => {
        put(item.children[0], error.text ?? "");
        const over = error.continued_at && `continued at ${zoned(error.continued_at)} by ${error.continued_by ?? "unknown"}`;
        put(item.children[1], over || (error.remedy ?? ""));
        put(item.children[2], zoned(error.at));
      },
    );
    this.history.hidden = !p.events?.length;
    keep(
      this.events,
      p.events ?? [],
      () => el("tr", {}, el("td"), el("td"), el("td")),
      (row, event) => {
        put(row.children[0], zoned(event.at));
        put(row.children[1], event.actor ?? "");
        put(row.children[2], [event.action, event.detail].filter(Boolean).join(": "));
      },
    );
  }

  showLinks({ progress: p, run, task: driver }) {
    const mapped = Number.parseInt(asked.get("map_index") ?? "-1", 10);
    const task = asked.get("task_id") ? { task_id: asked.get("task_id"), map_index: mapped } : driver;
    const over = OVER.includes(p.status);
    const key = JSON.stringify([task, p.spark_ui, over]);
    if (this.linked === key) return;
    this.linked = key;
    const to = `dags/${part(run.dag_id)}/runs/${part(run.run_id)}`;
    const spark = p.spark_ui && !over ? safe(p.spark_ui) : null;
    this.links.replaceChildren(
      ...(task ? [link("Log", `${to}/tasks/${part(task.task_id)}${task.map_index >= 0 ? `/mapped/${task.map_index}` : ""}`)] : []),
      link("Run", to),
      ...(spark ? [link("Spark’s UI", spark)] : []),
      link("All indexes", "plugin/indexes"),
    );
  }

  // --- changes

  ask(what) {
    const back = document.activeElement;
    const close = () => {
      this.asks.replaceChildren();
      // What was asked for may not be possible any more.
      [back, ...this.nextFocus()].find((one) => one?.checkVisibility()).focus();
    };
    this.asks.replaceChildren(question({ ...what, close, late: (text) => this.tell(text, true) }));
  }

  askPause() {
    this.ask({
      title: "Pause this operation?",
      text: "The workers finish their open batches, and all committed work stays. Writes to the table are still captured.",
      field: "Why, for others to read (optional)",
      verb: "Pause",
      yes: (reason) => this.attempt("pause", { reason }),
    });
  }

  mayThrottle({ progress: p, may_change: may, chosen: one }) {
    return may && one.drives && ["running", "abandoned", "pausing", "paused"].includes(p.status);
  }

  askLimits() {
    const now = this.content.progress.governor?.limits ?? "";
    this.ask({
      title: "Limits of signals",
      text: "Above a limit the operation slows down or waits. Example: replica_lag=100MB commit_latency=20ms. To remove a limit, delete its signal here; to remove all, leave the field empty.",
      field: "Limits",
      value: now,
      verb: "Set limits",
      yes: (throttle) => this.attempt("throttle", { throttle }),
    });
  }

  askRate() {
    this.ask({
      title: "Rate limit",
      text: "The rate at which all workers together may copy, from their next batch on. Empty or 0: no limit.",
      field: "Rows per second",
      value: String(this.content.progress.max_rows_per_second || ""),
      verb: "Set limit",
      yes: (text) => (/^[\d,]*$/.test(text) ? this.attempt("rate", { max_rows_per_second: Number(text.replaceAll(",", "")) }) : "The limit must be a whole number of rows per second."),
    });
  }

  askAbort() {
    const p = this.content.progress;
    this.ask({
      title: { verify: "Abort this verification?", compact: "Abort this compaction?" }[p.kind] ?? "Abort this build?",
      text: p.kind === "verify" ? "The verification loses its work so far. The index and its table stay as they are. To stop for a while, pause it instead." : p.kind === "compact" ? "New segments that were swapped in stay. Unfinished ones are removed, and the old ones stay as they are. To stop for a while, pause it instead." : `The build loses its work so far (${many(p.rows ?? 0, "row")}), and its workers stop at once. The DAG ${this.content.clean_up}${this.content.may_clean_up ? ", which is then triggered," : ""} removes the unfinished generation; until then each write to the table also writes to it. The table and the published index stay as they are. To stop for a while, pause it instead.`,
      field: "Why, for others to read (optional)",
      verb: "Abort",
      danger: true,
      yes: async (reason) => {
        const refusal = await this.attempt("abort", { reason });
        if (!refusal && this.content.may_clean_up) this.cleanUp();
        return refusal;
      },
    });
  }

  step(by) {
    const now = this.wanted ?? this.content.progress.workers.wanted;
    this.wanted = Math.min(Math.max(now + by, 1), 256);
    this.showControls(this.content);
    clearTimeout(this.stepping);
    // Several clicks are one change.
    this.stepping = setTimeout(() => this.sendWorkers(), 500);
  }

  sendWorkers() {
    clearTimeout(this.stepping);
    this.stepping = null;
    const wanted = this.wanted;
    this.change("workers", { parallelism: wanted }).finally(() => {
      if (this.wanted === wanted) this.wanted = null;
      this.showControls(this.content);
    });
  }

  /** The page goes away: what was clicked is sent first. */
  leave() {
    if (this.stepping) this.sendWorkers();
  }

  async change(verb, more = {}) {
    const refusal = await this.attempt(verb, more);
    if (refusal) this.tell(refusal, true);
  }

  /** Have the operation changed, and say so; why it was refused, or "". */
  async attempt(verb, more = {}) {
    const { connection, operation } = this.content.chosen;
    this.busy = true;
    this.showControls(this.content);
    try {
      const { said } = await send(address(`/${verb}`), { connection, operation, ...more });
      // Until the next look shows it: what held it up before, or the pause that is lifted, doesn't any more.
      const pauses = verb === "pause" && !said;
      const nothing = { by: "nothing", text: "" };
      if (pauses) this.content.progress = { ...this.content.progress, status: "pausing", rows_per_second_now: null, held_up: nothing, state: { name: "pausing", word: "Pausing", note: "The workers finish their open batches" } };
      if (verb === "resume") this.content.progress = { ...this.content.progress, status: "running", held_up: nothing, state: { name: "undriven", word: "Waiting", note: "" } };
      if (pauses || verb === "resume") holdFocus(this.node, () => this.draw(this.content), () => this.nextFocus());
      if (more.parallelism) this.content.progress.workers.wanted = more.parallelism;
      // The badge says a pause.
      this.tell(said, false);
      return "";
    } catch (refusal) {
      return refusal.message;
    } finally {
      this.busy = false;
      this.showControls(this.content);
      poll.now();
    }
  }

  /** Trigger a run that continues the operation with its present options, by the user's own rights. */
  async goOn() {
    const { continues: wish, progress: p } = this.content;
    this.busy = true;
    this.showControls(this.content);
    try {
      const run = await trigger(wish.dag_id, wish.conf);
      this.continuedBy = run.dag_run_id;
      // Only now: without a run the pause stays, and its reason. The run's task waits until a user's pause is lifted.
      const stays = p.status === "paused" || p.status === "pausing" ? await this.lift() : "";
      this.draw(this.content);
      this.tell(`${wish.dag_id} is triggered, and ${stays ? `waits, as the pause couldn't be lifted: ${stays.replace(/\.?$/, ".")} ` : "continues the operation. "}`, Boolean(stays), link("See its run", runPage({ dag_id: wish.dag_id, run_id: run.dag_run_id })));
    } catch (refusal) {
      this.tell(`No run of ${wish.dag_id} could be triggered: ${refusal.message}`, true);
    } finally {
      this.busy = false;
      this.showControls(this.content);
      poll.now();
    }
  }

  /** Lift the pause; why it stays, or "". */
  async lift() {
    const { connection, operation } = this.content.chosen;
    try {
      await send(address("/resume"), { connection, operation });
      return "";
    } catch (refusal) {
      return refusal.message;
    }
  }

  /** Have the DAG that cleans up do so for this database: its own schedule may be of another one. */
  async cleanUp() {
    const { clean_up: dag, chosen: one } = this.content;
    this.busy = true;
    this.showControls(this.content);
    try {
      await trigger(dag, { postgres_conn_id: one.connection });
      this.tell(`${dag} is triggered, and removes the unfinished generation.`, false);
    } catch (refusal) {
      this.tell(`The unfinished generation stays until a run of ${dag}, which couldn't be triggered: ${refusal.message}`, true);
    } finally {
      this.busy = false;
      this.showControls(this.content);
    }
  }

  tell(text, wrong, ...more) {
    this.said.replaceChildren(text, ...more);
    mark(this.said, "data-wrong", wrong ? "true" : null);
    clearTimeout(this.telling);
    this.telling = setTimeout(() => put(this.said, ""), wrong ? 20000 : 8000);
  }
}

const runPage = ({ dag_id: dag, run_id: run }) => `dags/${part(dag)}/runs/${part(run)}/plugin/index-build`;

function safe(address) {
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

addEventListener("pagehide", () => page?.leave());
poll.now();
