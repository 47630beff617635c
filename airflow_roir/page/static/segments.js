// The segments of an index, folded: what each takes, what it would take if it were built now, and who reads it.

import { keep } from "./draw.js";
import { DASH, bytes, count, duration, el, many, mark, put, share } from "./page.js";

const DAY_MS = 86_400_000;
// Of a bound, which may be a text of any length.
const SHORT = 24;
const TITLES = ["Segment", "Keys", "Rows", "Size", "If built now", "Leaves full", "Dead", "Reads a day", "Sealed"];

const bound = (values) => {
  const text = values.join(", ");
  return text.length > SHORT ? `${text.slice(0, SHORT - 1)}…` : text;
};

function keysOf({ ordinal, lower, upper }) {
  if (!lower && !upper) return ordinal === 0 ? "NULL" : "all";
  if (!lower) return `below ${bound(upper)}`;
  return upper ? `${bound(lower)} to ${bound(upper)}` : `from ${bound(lower)} on`;
}

const needed = (one) => (one.heap_needed === null || one.tree_needed === null ? null : one.heap_needed + one.tree_needed);

/** Scans a day; of less than a day all that there were. */
const reads = ({ scans, since }) => (since ? count(scans / Math.max(1, (Date.now() - new Date(since)) / DAY_MS)) : DASH);

const ago = (at) => (at ? `${duration((Date.now() - new Date(at)) / 1000)} ago` : DASH);

/** The list on a card of the page Indexes: the worst first, and not all of very many. */
export class SegmentList {
  constructor() {
    this.summary = el("summary");
    this.rows = el("tbody");
    this.rest = el("p", { class: "faint" });
    this.node = el(
      "details",
      {},
      this.summary,
      (this.region = el(
        "div",
        { class: "scrolls", tabindex: 0, role: "region" },
        el("table", { class: "of-segments" }, el("caption", { class: "unseen", text: "Segments, those first that would give most back if they were built now" }), el("thead", {}, el("tr", {}, ...TITLES.map((text) => el("th", { scope: "col", text })))), this.rows),
      )),
      this.rest,
    );
  }

  show({ index, segments: s }) {
    mark(this.region, "aria-label", `Segments of ${index}`);
    this.node.hidden = !s;
    if (!s) return;
    const free = s.needed === null ? null : Math.max(0, s.bytes - s.needed);
    put(this.summary, `${many(s.count, "segment")}${free === null ? "" : `, ${bytes(free)} of ${bytes(s.bytes)} free`}`);
    keep(
      this.rows,
      s.worst,
      () => el("tr", {}, el("th", { scope: "row" }), ...TITLES.slice(1).map(() => el("td"))),
      (row, one) => {
        const texts = [one.ordinal, keysOf(one), count(one.rows), bytes(one.heap_bytes + one.tree_bytes), bytes(needed(one)), share(one.leaf_density), count(one.dead_rows), reads(one), ago(one.sealed_at)];
        texts.forEach((text, n) => put(row.children[n], String(text)));
      },
    );
    const more = s.count - s.worst.length;
    this.rest.hidden = more <= 0;
    put(this.rest, more > 0 ? `And ${count(more)} more with less to win: roir status INDEX --segments shows all.` : "");
  }
}
