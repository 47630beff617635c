// A new index: its table and columns from the database, and all that is against it before a run is triggered.

import { keep } from "./draw.js";
import { el, get, off, put } from "./page.js";

let forms = 0;

/** The button in the head of a database, and the form below it. start(dag, conf): triggers; gives whether it could. */
export class NewIndex {
  constructor(connection, start) {
    Object.assign(this, { connection, start, dag: "", tables: [], named: "" });
    const id = `new-index-${(forms += 1)}`;
    const field = (name, label, of = {}) => {
      const input = el("input", { type: "text", maxlength: 2000, autocomplete: "off", spellcheck: "false", id: `${id}-${name}`, oninput: () => this.suggest(input), ...of });
      this[name] = input;
      return [el("label", { for: input.id, text: label }), input];
    };
    this.button = el("button", { type: "button", text: "Build an index", "aria-label": `Build an index: connection ${connection}`, hidden: true, onclick: () => this.open() });
    this.title = el("h3", { text: "Build an index", id: `${id}-title` });
    this.choices = el("datalist", { id: `${id}-tables` });
    this.columns = el("p", { class: "faint", id: `${id}-columns` });
    this.wrong = el("ul", { class: "wrong list", role: "alert", "aria-label": "Objections" });
    this.sure = el("button", { type: "submit", class: "main", text: "Check and build" });
    this.node = el(
      "form",
      { class: "panel new-index", "aria-labelledby": this.title.id, hidden: true, onsubmit: (event) => this.build(event), onkeydown: (event) => event.key === "Escape" && this.close() },
      this.title,
      field("table", "Table, with its schema", { list: this.choices.id, required: true }),
      this.choices,
      this.columns,
      field("keys", "Key columns or expressions, in order, separated by commas", { required: true, "aria-describedby": this.columns.id }),
      field("include", "Included columns, which users can read from the index alone", { "aria-describedby": this.columns.id }),
      field("where", "Condition: only rows that satisfy it are in the index; empty: all rows", { placeholder: "deleted_at IS NULL" }),
      field("index", "Name of the index, with its schema", { required: true, maxlength: 250 }),
      el("label", { class: "choice" }, (this.unique = el("input", { type: "checkbox" })), "Unique: no two rows may have the same key"),
      this.wrong,
      el("div", { class: "row" }, this.sure, el("button", { type: "button", text: "Cancel", onclick: () => this.close() })),
      (this.note = el("p", { class: "faint" })),
    );
  }

  /** Only a user who may trigger the DAG that builds gets the button. */
  allow(may, dag) {
    this.dag = dag;
    this.button.hidden = !may;
    put(this.note, `${dag} begins with its usual options; you can change them while it runs. Its own form has them all.`);
    if (!may) this.node.hidden = true;
  }

  async open() {
    this.node.hidden = false;
    this.table.focus();
    if (this.tables.length) return;
    try {
      this.tables = (await get(`api/tables?${new URLSearchParams({ connection: this.connection })}`)).tables;
      this.choices.replaceChildren(...this.tables.map((one) => el("option", { value: one.table })));
      this.suggest(this.table);
    } catch (refusal) {
      // Names can be typed all the same.
      put(this.columns, `The tables can’t be listed: ${refusal.message}`);
    }
  }

  close() {
    this.node.hidden = true;
    this.button.focus();
  }

  /** Show the table's columns, and name the index as long as the user hasn't. */
  suggest(changed) {
    const table = this.table.value.trim();
    const known = this.tables.find((one) => one.table === table);
    if (changed === this.table) put(this.columns, known ? `Its columns: ${known.columns.join(", ")}` : "");
    if (changed === this.index || this.index.value !== this.named) return;
    const first = this.keys.value.split(",")[0].trim();
    this.named = table && /^\w+$/.test(first) && !table.includes('"') ? `${table}_by_${first}` : "";
    this.index.value = this.named;
  }

  async build(event) {
    event.preventDefault();
    if (this.sure.hasAttribute("aria-disabled")) return;
    const conf = { index: this.index.value.trim(), table: this.table.value.trim(), keys: this.keys.value.trim(), include: this.include.value.trim(), where: this.where.value.trim(), unique: this.unique.checked };
    off(this.sure, true);
    put(this.sure, "Checking …");
    this.say([]);
    try {
      const { refused } = await get(`api/check?${new URLSearchParams({ connection: this.connection, ...conf })}`);
      this.say(refused);
      if (refused.length === 0 && (await this.start(this.dag, { ...conf, include: conf.include || null, where: conf.where || null, postgres_conn_id: this.connection }))) this.close();
    } catch (refusal) {
      this.say([refusal.message]);
    } finally {
      off(this.sure, false);
      put(this.sure, "Check and build");
    }
  }

  say(texts) {
    keep(this.wrong, texts, () => el("li"), (item, text) => put(item, text));
    this.wrong.hidden = texts.length === 0;
  }
}
