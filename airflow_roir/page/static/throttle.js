// What holds an operation back: its limits, the time that each cost, each signal against its limit, the grant.

import { DASH, bytes, clock, duration, el, many, mark, put, share, zoned } from "./page.js";
import { keep, svg } from "./draw.js";

const NAMES = {
  replica_lag: "Replica’s lag",
  replica_delay: "Replica’s delay",
  slot_wal: "WAL kept by slots",
  slot_room: "Room of slots",
  oldest_transaction: "Oldest transaction",
  free_space: "Free space",
  shard_lag: "Lag of shards",
  outbox: "Outboxes",
  query: "Your own query",
  commit_latency: "Commit latency",
  active_sessions: "Active sessions",
  lock_waits: "Waits for locks",
  wal_rate: "WAL",
  checkpoints: "WAL until a checkpoint",
  // Other causes of lost time.
  unreadable: "Signals that couldn’t be read",
  starting: "Beginning with few workers",
  disk: "Lack of disk",
  memory: "Lack of memory",
  connections: "Lack of connections",
  limit: "A limit of the server",
  exhausted: "Lack of the server’s resources",
  cancelled: "Statements that others cancelled",
};
// Whose value it is.
const WHOSE = { replica_lag: "replica ", replica_delay: "replica ", slot_wal: "slot ", slot_room: "slot ", shard_lag: "shard ", outbox: "shard " };
const WIDTH = 300;
const HEIGHT = 60;

/** A value with its unit. */
function said(value, { unit, per }) {
  if (value === null || value === undefined) return DASH;
  if (unit === "bytes") return bytes(value) + per;
  if (unit === "seconds") return value < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : duration(value);
  return `${Number(value.toPrecision(4))}${per}`;
}

/** A small chart of [at, value or null, limit]: the line, the limit, and a gap where nothing could be read. */
class Small {
  constructor() {
    this.name = el("b");
    this.now = el("span", { class: "now" });
    this.limit = svg("path", { class: "limit" });
    this.line = svg("path", { class: "line" });
    this.over = svg("path", { class: "over" });
    this.gaps = svg("path", { class: "gaps" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "chart small" });
    this.picture.append(svg("path", { class: "grid", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }), this.gaps, this.limit, this.line, this.over);
    this.more = el("small");
    this.node = el("li", { class: "signal" }, el("div", { class: "row ends" }, this.name, this.now), this.picture, this.more);
  }

  show({ name, points, format, isOver, from, to, now, state, more }) {
    put(this.name, name);
    put(this.now, now);
    put(this.more, more);
    mark(this.node, "data-state", state);
    const known = points.filter((point) => point.value !== null);
    const span = Math.max(to - from, 1);
    const top = 1.15 * Math.max(...known.map((point) => point.value), ...points.map((point) => point.limit), 1e-9);
    const x = (at) => Math.min(Math.max(((at - from) / span) * WIDTH, 0), WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 2)).toFixed(1);
    const usual = usualSpan(points);
    let line = "";
    let over = "";
    let gaps = "";
    let limit = "";
    points.forEach((point, n) => {
      const before = points[n - 1];
      // Nobody looked: a pause, or nobody drove it.
      const follows = before && point.at - before.at <= Math.max(5 * usual, 15);
      limit += `${follows && before.limit === point.limit ? "L" : follows ? `L${x(point.at)} ${y(before.limit)}L` : "M"}${x(point.at)} ${y(point.limit)}`;
      if (point.value === null) {
        gaps += `M${x(follows ? before.at : point.at)} ${HEIGHT / 2}H${x(point.at)}`;
        return;
      }
      const at = `${x(point.at)} ${y(point.value)}`;
      const goes = follows && before.value !== null;
      line += goes ? `L${at}` : `M${at}h0.1`;
      if (goes && (isOver(point) || isOver(before))) over += `M${x(before.at)} ${y(before.value)}L${at}`;
    });
    this.line.setAttribute("d", line);
    this.over.setAttribute("d", over);
    this.gaps.setAttribute("d", gaps);
    this.limit.setAttribute("d", limit);
    const values = known.map((point) => point.value);
    mark(
      this.picture,
      "aria-label",
      `${name} from ${clock(new Date(from * 1000))} to ${clock(new Date(to * 1000))}: ${values.length ? `lowest ${format(Math.min(...values))}, highest ${format(Math.max(...values))}, last ${format(values.at(-1))}` : "nothing could be read"}; limit ${format(points.at(-1)?.limit)}${known.length < points.length ? "; at times it couldn't be read" : ""}`,
    );
  }
}

function usualSpan(points) {
  const spans = points.slice(1).map((point, n) => point.at - points[n].at);
  return spans.sort((a, b) => a - b)[Math.floor(spans.length / 2)] ?? 1;
}

/** The panel Throttle; nothing where nothing throttles. `edit`: called when the user wants other limits. */
export class Throttle {
  constructor(edit) {
    this.sum = el("span", { class: "sum" });
    this.edit = el("button", { type: "button", text: "Change limits", onclick: edit });
    this.limits = el("code");
    this.lost = el("dl", { class: "pairs lost" });
    this.lostTitle = el("h3", { text: "Time lost" });
    this.charts = el("ul", { class: "signals" });
    this.times = el("p", { class: "faint" });
    this.node = el(
      "section",
      { class: "panel throttle", "aria-label": "Throttle" },
      el("header", {}, el("h2", { text: "Throttle" }), this.sum, this.edit),
      (this.written = el("p", { class: "limits" }, "Limits: ", this.limits)),
      (this.lostPart = el("div", {}, this.lostTitle, this.lost)),
      this.charts,
      this.times,
    );
    this.made = new Map();
  }

  show(p, mayChange) {
    const t = p.governor;
    this.node.hidden = !t;
    if (!t) return;
    this.edit.hidden = !mayChange;
    const runs = p.status === "running";
    const since = t.since ? ` since ${zoned(t.since)}` : "";
    put(this.sum, !runs ? "" : t.throttled ? `${t.granted === 0 ? "on hold" : "paced"}${since}` : t.limits ? "all may work" : "");
    put(this.limits, t.limits || "none");
    this.lostPart.hidden = t.lost.length === 0;
    keep(
      this.lost,
      t.lost,
      () => el("div", {}, el("dt"), el("dd")),
      (row, one) => {
        put(row.firstElementChild, NAMES[one.cause] ?? one.cause);
        put(row.lastElementChild, `${duration(one.seconds)} · ${share(one.share)} of the work`);
      },
    );
    this.showCharts(p, t);
  }

  showCharts(p, t) {
    const times = [...t.grants.map(([at]) => at), ...t.signals.flatMap((signal) => signal.points.map((point) => point.at))];
    const from = Math.min(...times);
    const to = Math.max(...times);
    const shown = [];
    if (t.grants.length > 1) {
      const wanted = p.workers?.wanted ?? 1;
      const few = (value) => (value === 0 ? "none: on hold" : value < 1 ? `${Math.round(100 * value)} % of one` : many(Number(value.toFixed(1)), "worker"));
      const last = t.granted ?? t.grants.at(-1)[1];
      shown.push({
        key: "grant",
        name: "Workers granted",
        points: t.grants.map(([at, value]) => ({ at, value, limit: wanted })),
        format: few,
        isOver: () => false,
        now: p.status === "running" ? few(last) : "",
        state: null,
        more: `of ${many(wanted, "worker")}`,
      });
    }
    for (const signal of t.signals) {
      if (!signal.points.length) continue;
      const last = signal.points.at(-1);
      const format = (value) => said(value, signal);
      const isOver = (point) => point.value !== null && (signal.below ? point.value < point.limit : point.value > point.limit);
      const unread = signal.has_limit && last.value === null;
      shown.push({
        key: signal.name,
        name: NAMES[signal.name] ?? signal.name,
        points: signal.points,
        format,
        isOver,
        now: unread ? "can’t be read" : format(last.value),
        state: !signal.has_limit ? "gone" : unread ? "unread" : isOver(last) ? "over" : null,
        more: !signal.has_limit ? "no limit any more" : unread && signal.problem ? signal.problem : `${signal.below ? "at least" : "limit"} ${format(last.limit)}${last.of ? ` · ${WHOSE[signal.name] ?? ""}${last.of}` : ""}`,
      });
    }
    for (const key of this.made.keys()) {
      if (!shown.some((one) => one.key === key)) {
        this.made.get(key).node.remove();
        this.made.delete(key);
      }
    }
    shown.forEach((one, n) => {
      if (!this.made.has(one.key)) this.made.set(one.key, new Small());
      const { node } = this.made.get(one.key);
      if (this.charts.children[n] !== node) this.charts.insertBefore(node, this.charts.children[n] ?? null);
      this.made.get(one.key).show({ ...one, from, to });
    });
    this.charts.hidden = shown.length === 0;
    put(this.times, shown.length ? `${clock(new Date(from * 1000))} to ${zoned(new Date(to * 1000))}. The dashed line is the limit. If a signal couldn’t be read, its line has a gap.` : "");
  }
}
