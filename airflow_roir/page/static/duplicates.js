// Rows that share a key of a unique index: read only when somebody opens the list, some at a time.

import { DASH, count, el, get, holdFocus, many, off, put, time } from "./page.js";

export class Duplicates {
  /** address: gives where to ask, with what is to be added. */
  constructor(address) {
    this.address = address;
    this.key = null;
    this.after = 0;
    this.opened = false;
    this.summary = el("summary");
    this.what = el("p", { class: "faint" });
    this.body = el("tbody");
    this.more = el("button", { type: "button", text: "More", hidden: true, onclick: () => this.read() });
    this.said = el("p", { class: "faint", role: "status" });
    this.table = el(
      "table",
      { class: "of-duplicates" },
      el("caption", { class: "unseen", text: "Rows that share a key" }),
      el("thead", {}, el("tr", {}, ...["Key", "Primary key", "Partition", "Found", "Healed"].map((text) => el("th", { scope: "col", text })))),
      this.body,
    );
    this.node = el("details", { class: "panel", hidden: true, ontoggle: () => this.node.open && this.key !== this.read_for && this.restart() }, this.summary, this.what, el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Rows that share a key" }, this.table), this.more, this.said);
  }

  show(p) {
    const keys = p.duplicate_keys ?? 0;
    this.node.hidden = !p.has_duplicates;
    if (this.node.hidden) return;
    put(this.summary, keys ? `Duplicates: ${many(p.duplicate_rows, "row")} share ${many(keys, "key")}` : "Duplicates: all are healed");
    put(
      this.what,
      p.census ? "A census: only this list is kept." : keys ? "Change or delete rows until no two share a key, then resume the operation. The resume checks these keys again." : "",
    );
    this.key = JSON.stringify([p.operation_id, keys, p.duplicate_rows]);
    // Once: whoever closes it wants it closed.
    if (!this.opened && keys && p.status === "paused") this.node.open = this.opened = true;
    if (this.node.open && this.key !== this.read_for) this.restart();
  }

  restart() {
    this.read_for = this.key;
    this.after = 0;
    this.body.replaceChildren();
    this.read();
  }

  async read() {
    const of = this.read_for;
    off(this.more, true);
    try {
      const { groups, last } = await get(this.address({ after: String(this.after) }));
      // It was asked again meanwhile.
      if (of !== this.read_for) return;
      for (const group of groups) this.body.append(...rowsOf(group));
      this.after = groups.at(-1)?.id ?? this.after;
      holdFocus(this.node, () => (this.more.hidden = last), () => [this.summary]);
      put(this.said, "");
    } catch (refusal) {
      put(this.said, refusal.message);
      this.more.hidden = false;
    } finally {
      off(this.more, false);
    }
  }
}

function rowsOf(group) {
  const rows = group.rows.map((one, n) =>
    el(
      "tr",
      { class: n ? null : "first" },
      n ? el("td") : el("th", { scope: "rowgroup", text: group.key }),
      el("td", { text: one.primary_key }),
      el("td", { text: one.partition ?? DASH }),
      el("td", {}, time(one.found_at)),
      el("td", {}, one.healed_at ? time(one.healed_at) : DASH),
    ),
  );
  const left = group.count - group.rows.length;
  if (left > 0) rows.push(el("tr", {}, el("td"), el("td", { colspan: 4, class: "faint", text: `and ${count(left)} more` })));
  return rows;
}
