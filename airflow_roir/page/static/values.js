// The values that a run was triggered with.

import { keep } from "./draw.js";
import { el, put } from "./page.js";

/** Names and texts of the values that aren't empty. */
export function textsOf(values) {
  const given = Object.entries(values ?? {}).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && value.length === 0));
  return given.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
}

/** A list of them that can be opened: Airflow's form changes numbers without a word. */
export class Values {
  constructor() {
    this.rows = el("tbody");
    this.node = el(
      "details",
      { class: "panel", hidden: true },
      el("summary", { text: "Values of this run" }),
      el("p", { class: "faint", text: "As Airflow's form sent them: it moves a number outside a field's bounds to the nearest bound." }),
      el("table", {}, el("caption", { class: "unseen", text: "Values that this run was triggered with" }), el("thead", {}, el("tr", {}, ...["Field", "Value"].map((text) => el("th", { scope: "col", text })))), this.rows),
    );
  }

  show(values) {
    const texts = textsOf(values);
    this.node.hidden = texts.length === 0;
    keep(
      this.rows,
      texts,
      () => el("tr", {}, el("th", { scope: "row" }), el("td")),
      (row, [name, text]) => {
        put(row.children[0], name);
        put(row.children[1], text);
      },
    );
  }
}
