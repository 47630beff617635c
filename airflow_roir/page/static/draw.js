// The drawings of the page Index build: phases, pieces, the chart. Each keeps its nodes and has words for what it shows.

import { DASH, bytes, clock, count, duration, el, many, mark, put, short, zoned } from "./page.js";

const SVG = "http://www.w3.org/2000/svg";
// More cells than this are too narrow for a number.
const NUMBERED = 48;

export function svg(name, of) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(of)) node.setAttribute(key, value);
  return node;
}

/** Make `node` have one child per item: `make()` for new ones, `update(child, item)` for all. */
export function keep(node, items, make, update) {
  while (node.children.length > items.length) node.lastElementChild.remove();
  items.forEach((item, n) => {
    if (!node.children[n]) node.append(make(item));
    update(node.children[n], item, n);
  });
}

/** The six phases (of a verification: its own) in a row. */
export class Phases {
  constructor() {
    this.node = el("ol", { class: "phases", "aria-label": "Phases" });
  }

  show(phases) {
    keep(
      this.node,
      phases,
      () => el("li", {}, el("span", { class: "line" }), el("span", { class: "name" }), el("span", { class: "seconds" })),
      (item, phase) => {
        mark(item, "data-state", phase.state);
        mark(item, "aria-current", phase.state === "now" ? "step" : null);
        put(item.children[1], phase.name);
        put(item.children[2], phase.state === "ahead" ? "" : phase.seconds === null || phase.seconds === undefined ? DASH : duration(phase.seconds));
        mark(item, "aria-label", `${phase.name}: ${{ done: "done", now: "now", ahead: "ahead" }[phase.state] ?? phase.state}`);
      },
    );
  }
}

/** One cell per range, segment or unit, or per group of neighbours where there are too many of them. */
export class Pieces {
  constructor() {
    this.title = el("h2", { text: "Ranges" });
    this.sum = el("span", { class: "sum" });
    this.cells = el("div", { class: "cells", role: "img" });
    this.legend = el(
      "p",
      { class: "legend" },
      ...[["waiting", "waiting"], ["working", "being worked on"], ["done", "done"]].map(([state, text]) => el("span", {}, el("i", { "data-state": state, "aria-hidden": "true" }), text)),
      (this.grouped = el("span", { class: "faint" })),
    );
    this.node = el("section", { class: "panel" }, el("header", {}, this.title, this.sum), this.cells, this.legend);
  }

  /** idle: nobody works, so what a worker has left isn't being worked on. */
  show(bars, idle = false) {
    const items = (bars?.items ?? []).map((item) => (idle ? { ...item, workers: [], state: item.state === "working" ? "waiting" : item.state } : item));
    const more = bars?.of ?? "pieces", one = more.slice(0, -1);
    put(this.title, more.replace(/^./, (first) => first.toUpperCase()));
    put(this.sum, bars ? `${count(bars.done)} of ${count(bars.count)} done` : "");
    this.node.hidden = items.length === 0;
    mark(this.cells, "data-size", items.length <= NUMBERED ? "large" : "small");
    keep(
      this.cells,
      items,
      () => el("span", { class: "cell" }, el("b"), el("em")),
      (cell, item) => {
        const done = item.state === "done" ? 1 : Math.min(Math.max(item.done ?? 0, 0), 1);
        const workers = item.workers ?? [];
        mark(cell, "data-state", item.state === "mixed" && workers.length ? "working" : item.state);
        cell.firstElementChild.style.height = `${Math.round(done * 1000) / 10}%`;
        put(cell.lastElementChild, items.length <= NUMBERED && workers.length ? workers.join(" ") : "");
        const which = item.from === item.to ? `${one} ${item.from}` : `${more} ${item.from} to ${item.to}`;
        const by = workers.length ? `, ${workers.length === 1 ? "worker" : "workers"} ${workers.join(", ")}` : "";
        const rows = item.rows === null || item.rows === undefined ? "" : `, ${many(item.rows, "row")}`;
        mark(cell, "title", `${which}: ${Math.round(done * 100)} %${by}${rows}`);
      },
    );
    const each = items.length ? Math.max(...items.map((item) => item.to - item.from + 1)) : 1;
    put(this.grouped, each > 1 ? `one cell is up to ${each} ${more}` : "");
    const busy = items.filter((item) => item.workers?.length);
    const words = busy.map((item) => `${item.workers.length === 1 ? "worker" : "workers"} ${item.workers.join(", ")} at ${one} ${item.from}`).slice(0, 8);
    mark(this.cells, "aria-label", bars ? `${count(bars.done)} of ${many(bars.count, one, more)} done${words.length ? `; ${words.join("; ")}` : ""}` : "nothing to show yet");
  }
}

/** Rows per second over time, from samples [unix seconds, rows, percent]. */
export class Chart {
  constructor() {
    this.sum = el("span", { class: "sum" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.grid = svg("path", { class: "grid", d: "M0 1H600M0 70H600M0 139H600" });
    this.picture = svg("svg", { viewBox: "0 0 600 140", preserveAspectRatio: "none", role: "img", class: "chart" });
    this.picture.append(this.grid, this.area, this.line);
    this.high = el("span", { "aria-hidden": "true" });
    this.middle = el("span", { "aria-hidden": "true" });
    this.from = el("span", { "aria-hidden": "true" });
    this.to = el("span", { "aria-hidden": "true" });
    this.node = el(
      "section",
      { class: "panel" },
      el("header", {}, el("h2", { text: "Rows per second" }), this.sum),
      el("div", { class: "frame" }, el("div", { class: "scale" }, this.high, this.middle, el("span", { "aria-hidden": "true", text: "0" })), this.picture),
      el("div", { class: "times" }, this.from, this.to),
    );
  }

  show(samples, average) {
    const rates = ratesOf(samples ?? []);
    const few = rates.length < 2;
    this.node.hidden = few;
    put(this.sum, average === null || average === undefined ? "" : `${short(average)} on average`);
    if (few) return;
    const begin = rates[0].from;
    const span = Math.max(rates.at(-1).to - begin, 1);
    const top = nice(Math.max(...rates.map((rate) => rate.value), 1));
    const x = (at) => ((at - begin) / span) * 600;
    const y = (value) => 139 - (value / top) * 138;
    let line = "";
    let area = "";
    let open = null;
    const close = (at) => {
      if (open !== null) area += `L${x(at).toFixed(1)} 139L${x(open).toFixed(1)} 139Z`;
    };
    rates.forEach((rate, n) => {
      const point = `${x(rate.to).toFixed(1)} ${y(rate.value).toFixed(1)}`;
      if (open === null || rate.gap) {
        if (open !== null) close(rates[n - 1].to);
        open = rate.from;
        const start = `${x(rate.from).toFixed(1)} ${y(rate.value).toFixed(1)}`;
        line += `M${start}`;
        area += `M${start}`;
      }
      line += `L${point}`;
      area += `L${point}`;
    });
    close(rates.at(-1).to);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    put(this.high, short(top));
    put(this.middle, short(top / 2));
    put(this.from, clock(new Date(begin * 1000)));
    put(this.to, zoned(new Date(rates.at(-1).to * 1000)));
    const values = rates.map((rate) => rate.value);
    mark(
      this.picture,
      "aria-label",
      `Rows per second from ${clock(new Date(begin * 1000))} to ${clock(new Date(rates.at(-1).to * 1000))}: lowest ${count(Math.min(...values))}, highest ${count(Math.max(...values))}, last ${count(values.at(-1))}`,
    );
  }
}

function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value * 1.05) ?? 10 * unit;
}

function ratesOf(samples) {
  const spans = samples.slice(1).map((sample, n) => sample[0] - samples[n][0]).filter((span) => span > 0);
  const usual = [...spans].sort((a, b) => a - b)[Math.floor(spans.length / 2)] ?? 1;
  const rates = [];
  let gap = false;
  samples.slice(1).forEach((sample, n) => {
    const [from, rows] = samples[n];
    const span = sample[0] - from;
    if (span <= 0) return;
    // Nobody sampled: a pause, or nobody drove it.
    if (span > Math.max(5 * usual, 15)) {
      gap = true;
      return;
    }
    rates.push({ from, to: sample[0], value: Math.max(sample[1] - rows, 0) / span, gap });
    gap = false;
  });
  return rates;
}

/** What the delta consists of. */
export class Delta {
  constructor() {
    this.sum = el("span", { class: "sum" });
    this.bar = el("div", { class: "stack", role: "img" });
    this.list = el("dl", { class: "pairs" });
    this.node = el("section", { class: "panel" }, el("header", {}, el("h2", { text: "Delta" }), this.sum), this.bar, this.list);
  }

  show(delta) {
    this.node.hidden = !delta;
    put(this.sum, delta ? `${many(delta.rows, "row")}${delta.sampled ? " (estimated)" : ""} · ${bytes(delta.bytes)}` : "");
    const parts = [
      ["regular", "New and changed entries", delta?.regular],
      ["antimatter", "Marks of removed entries", delta?.antimatter],
      ["ghosts", "Ghosts, for the clean-up", delta?.ghosts],
    ];
    const all = parts.reduce((sum, [, , value]) => sum + (value ?? 0), 0);
    keep(this.bar, parts, () => el("i"), (part, [name, , value]) => {
      mark(part, "data-part", name);
      part.style.flexGrow = all ? String((value ?? 0) / all) : "0";
    });
    mark(this.bar, "aria-label", parts.map(([, text, value]) => `${text}: ${count(value)}`).join("; "));
    keep(
      this.list,
      parts,
      () => el("div", {}, el("dt", {}, el("i"), el("span")), el("dd")),
      (row, [name, text, value]) => {
        mark(row.firstElementChild.firstElementChild, "data-part", name);
        put(row.firstElementChild.lastElementChild, text);
        put(row.lastElementChild, count(value));
      },
    );
  }
}
