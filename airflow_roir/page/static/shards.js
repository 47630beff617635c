// The shards of an index that is apart from its tables: what is read of each, how far each is behind, which is down.

import { keep } from "./draw.js";
import { DASH, count, duration, el, many, mark, put, short } from "./page.js";

// Of shards without a shipper, in one line.
const MOST_NAMES = 5;

/** What is wrong with a shard: how bad that is, and the words; null if nothing is. */
export function troubleOf(shard) {
  if (shard.doubt) return ["bad", `Entries may be wrong: ${shard.doubt}`];
  if (shard.problem) return ["away", shard.problem];
  if (shard.captured === false) return ["away", "Not captured yet"];
  return null;
}

/** How far a shard is behind. */
export function behind(shard) {
  const lag = shard.lag_seconds;
  const late = lag === null || lag === undefined ? "not shipped to the end yet" : lag < 60 ? `${lag.toFixed(1)} s` : duration(lag);
  return shard.pending ? `${late}, ${many(shard.pending, "row")} to ship` : late;
}

const row = () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td"), el("td"), el("td"));

function fill(node, name, texts, trouble) {
  put(node.children[0], name);
  texts.forEach((text, n) => put(node.children[n + 1], text));
  put(node.children[4], trouble ? trouble[1] : "");
  mark(node, "data-trouble", trouble ? trouble[0] : null);
}

class Shown {
  constructor(titles) {
    this.rows = el("tbody");
    this.table = el(
      "div",
      { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table of shards" },
      el("table", { class: "of-shards" }, el("caption", { class: "unseen", text: "Shards" }), el("thead", {}, el("tr", {}, ...titles.map((text) => el("th", { scope: "col", text })))), this.rows),
    );
  }
}

/** The panel Shards of the page Index build; nothing where the table is in the index's own database. */
export class Shards extends Shown {
  constructor() {
    super(["Shard", "Read", "Workers", "Behind", "Trouble"]);
    this.sum = el("span", { class: "sum" });
    this.node = el("section", { class: "panel shards", "aria-label": "Shards" }, el("header", {}, el("h2", { text: "Shards" }), this.sum), this.table);
  }

  show(p) {
    const shards = p.shards ?? [];
    this.node.hidden = shards.length === 0;
    const troubled = shards.filter(troubleOf).length;
    put(this.sum, troubled ? `${troubled} of ${many(shards.length, "shard")} in trouble` : p.shard_parallelism ? `at most ${many(p.shard_parallelism, "worker")} in each` : "");
    keep(this.rows, shards, row, (node, one) => {
      const read = one.ranges ? `${short(one.rows)} rows, ${count(one.ranges_done)} of ${many(one.ranges, "range")}` : DASH;
      // Until all is copied nothing is shipped: what is written waits in the outboxes.
      const late = one.lag_seconds === null && one.ranges && one.ranges_done < one.ranges ? DASH : behind(one);
      fill(node, one.shard, [read, one.ranges ? count(one.readers) : DASH, late], troubleOf(one));
    });
  }
}

/** The shards of an index on the page Indexes, folded: many may be there. */
export class ShardList extends Shown {
  constructor() {
    super(["Shard", "Behind", "Shipped", "Shipper", "Trouble"]);
    this.summary = el("summary");
    this.node = el("details", {}, this.summary, this.table);
  }

  show(index) {
    mark(this.table, "aria-label", `Shards of ${index.index}`);
    const shards = shardsOf(index);
    this.node.hidden = shards.length === 0;
    put(this.summary, many(shards.length, "shard"));
    keep(this.rows, shards, row, (node, one) => fill(node, one.shard, [behind(one), many(one.shipped, "row"), one.shipper ?? "none"], troubleOf(one)));
  }
}

/** The shards of what readers see. */
export const shardsOf = (index) => (index.shards ?? []).filter((one) => one.generation === "active");

/** What a card says of them without being unfolded: name, value, more, state. */
export function factsOfShards(index) {
  if (!index.apart || index.state !== "published") return [];
  const shards = shardsOf(index);
  const lags = shards.map((one) => one.lag_seconds);
  const known = lags.every((lag) => lag !== null && lag !== undefined);
  const worst = shards[lags.indexOf(Math.max(...lags.map((lag) => lag ?? Infinity)))];
  const late = !shards.length ? [DASH, ""] : known ? [behind({ lag_seconds: Math.max(...lags) }), shards.length > 1 ? `the worst of ${many(shards.length, "shard")}${worst ? `: ${worst.shard}` : ""}` : ""] : ["not known", "a shard wasn’t shipped to the end yet"];
  const by = index.announced_by;
  const strict = !by ? ["off", "writes aren’t announced"] : index.strict_problem ? ["refused", index.strict_problem, "bad"] : ["possible", `announced by the ${by}`, "good"];
  return [["Behind", ...late], ["Strict reads", ...strict]];
}

/** What there is to be warned of. */
export function warningsOfShards(index) {
  const shards = shardsOf(index);
  const troubled = shards.filter(troubleOf).map((one) => `Shard ${one.shard}: ${troubleOf(one)[1]}`);
  const alone = shards.filter((one) => !one.shipper && !troubleOf(one)).map((one) => one.shard);
  if (!alone.length) return troubled;
  const names = alone.length > MOST_NAMES ? `${alone.slice(0, MOST_NAMES).join(", ")} and ${alone.length - MOST_NAMES} more` : alone.join(", ");
  return [...troubled, `No shipper is running for ${names}. Run roir ship, or turn on the DAG ship_changes.`];
}
