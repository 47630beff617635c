// All that a first build needs: the list of `roir doctor`, on demand, since a look may take seconds.

import { keep } from "./draw.js";
import { el, get, many, mark, off, put, say } from "./page.js";

const WORDS = { ok: "OK", warning: "Warning", problem: "Problem", unknown: "Not known" };
// The colours of chips.
const COLOURS = { ok: "completed", warning: "paused", problem: "failed", unknown: "aged" };

/** The button in the head of a database, and the list below it. */
export class SetUp {
  constructor(connection) {
    this.connection = connection;
    this.asked = false;
    this.button = el("button", { type: "button", text: "Check for a first build", "aria-label": `Check for a first build: connection ${connection}`, onclick: () => this.look() });
    this.title = el("h3", { text: "Check for a first build" });
    this.sum = el("p", { class: "sum" });
    this.parts = el("div");
    this.note = el("p", { class: "faint" });
    this.node = el("section", { class: "panel of-set-up", "aria-label": `Check of connection ${connection} for a first build`, hidden: true }, this.title, this.sum, this.parts, this.note);
  }

  /** Only a user who may begin a build may look. */
  allow(may) {
    this.button.hidden = !may;
  }

  /** Look by itself, but only once. */
  once() {
    if (!this.asked) this.look();
  }

  async look() {
    this.asked = true;
    this.node.hidden = false;
    off(this.button, true);
    mark(this.node, "aria-busy", "true");
    put(this.sum, "Looking …");
    try {
      const content = await get(`api/set-up?connection=${encodeURIComponent(this.connection)}`);
      this.show(content);
    } catch (refusal) {
      put(this.sum, `Not checked: ${refusal.message}`);
      mark(this.sum, "data-wrong", "true");
    } finally {
      off(this.button, false);
      mark(this.node, "aria-busy", null);
      say(this.sum.textContent);
    }
  }

  show({ found, note }) {
    const number = (verdict) => found.filter((one) => one.verdict === verdict).length;
    const counts = [["problem", "problem"], ["warning", "warning"]].filter(([verdict]) => number(verdict)).map(([verdict, word]) => many(number(verdict), word));
    put(this.sum, counts.length ? `${counts.join(", ")}.` : "No problem found.");
    mark(this.sum, "data-wrong", number("problem") ? "true" : null);
    const places = [...new Set(found.map((one) => one.where))];
    keep(
      this.parts,
      places,
      () => el("div", {}, el("h4"), el("table", {}, el("caption", { class: "unseen" }), el("thead", { class: "unseen" }, el("tr", {}, ...["Verdict", "Checked", "Found"].map((text) => el("th", { scope: "col", text })))), el("tbody"))),
      (part, where) => {
        put(part.children[0], where);
        const table = part.children[1];
        put(table.children[0], where);
        keep(
          table.children[2],
          found.filter((one) => one.where === where),
          () => el("tr", {}, el("td", {}, el("span", { class: "chip" })), el("th", { scope: "row" }), el("td", {}, el("span"), el("small"))),
          (row, one) => {
            const chip = row.children[0].firstChild;
            put(chip, WORDS[one.verdict]);
            mark(chip, "data-status", COLOURS[one.verdict]);
            put(row.children[1], one.what);
            put(row.children[2].firstChild, one.says);
            put(row.children[2].lastChild, one.remedy);
          },
        );
      },
    );
    put(this.note, `${note}.`);
  }
}
