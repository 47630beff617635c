// Why tasks of a run failed: their messages, their logs, and the way to try again.

import { keep } from "./draw.js";
import { clock, el, link, mark, off, openForm, part, put, question, say, trigger, zoned, zoneName } from "./page.js";
import { textsOf } from "./values.js";

/** The failed tasks of a run, below each other. */
export class Failures {
  constructor() {
    this.content = null;
    this.list = el("ol", { class: "list failures" });
    this.again = el("button", { type: "button", text: "Trigger again", onclick: () => this.ask() });
    this.asks = el("div", { class: "asks" });
    this.said = el("p", { class: "said", role: "status", hidden: true });
    this.spoken = "";
    this.node = el(
      "section",
      { class: "panel of-failures", "aria-labelledby": "failures-title", hidden: true },
      el("header", {}, (this.title = el("h2", { id: "failures-title", tabindex: -1 })), this.again),
      this.said,
      this.asks,
      this.list,
    );
  }

  show(content) {
    this.content = content;
    const { failures = [], again, continues, continued_by: by, run } = content;
    this.node.hidden = failures.length === 0;
    put(this.title, run.state === "failed" ? "Why this run has failed" : "What has failed");
    // An operation that is left has its own button, and one that another run continues needs no further run.
    this.again.hidden = !again || Boolean(continues || by);
    keep(
      this.list,
      failures,
      () => el("li", {}, el("b"), el("pre"), el("small")),
      (item, one) => {
        put(item.children[0], `${one.text}.`.replace(/([.?!])\.$/, "$1"));
        put(item.children[1], one.message ?? "");
        item.children[1].hidden = !one.message;
        // By its keys it can be scrolled.
        const scrolls = item.children[1].scrollHeight > item.children[1].clientHeight + 1;
        mark(item.children[1], "tabindex", scrolls ? 0 : null);
        mark(item.children[1], "role", scrolls ? "group" : null);
        mark(item.children[1], "aria-label", scrolls ? `Message of ${one.task_id}` : null);
        this.showRest(item.children[2], one, run);
      },
    );
    const words = failures.map((one) => one.text).join(". ");
    if (words && words !== this.spoken) say(words);
    this.spoken = words;
  }

  /** When it was, when the next try is, and the log. The nodes stay as long as they say the same. */
  showRest(node, one, run) {
    const key = JSON.stringify([one.task_id, one.map_index, one.try_number, one.at, one.again]);
    if (node.dataset.key === key) return;
    mark(node, "data-key", key);
    const log = `dags/${part(run.dag_id)}/runs/${part(run.run_id)}/tasks/${part(one.task_id)}${one.map_index >= 0 ? `/mapped/${one.map_index}` : ""}?try_number=${one.try_number}`;
    const parts = [
      one.again ? `Goes on by itself at the next try, about ${clock(one.again).slice(0, 5)} ${zoneName(one.again)}.` : "",
      one.at ? zoned(one.at) : "",
      one.task_id ? link(`Log of ${one.task_id}${one.map_index >= 0 ? ` [${one.map_index}]` : ""}`, log) : "",
    ].filter(Boolean);
    node.replaceChildren(...parts.flatMap((text, n) => (n ? [" · ", text] : [text])));
  }

  /** Airflow's form, where the wrong value can be corrected; else a question. */
  async ask() {
    if (await openForm()) return;
    const { again: { dag_id: dag, conf }, run } = this.content;
    const close = () => {
      this.asks.replaceChildren();
      (this.again.checkVisibility() ? this.again : this.title).focus();
    };
    const values = textsOf(run.values).map(([name, text]) => `${name}=${text}`);
    this.asks.replaceChildren(
      question({
        title: `Trigger ${dag} again?`,
        text: values.length ? `With the values of this run: ${values.join(", ")}. To correct one first, use Airflow's button Trigger.` : "With the defaults of its form, as this run.",
        verb: "Trigger",
        yes: () => this.trigger(dag, conf),
        close,
      }),
    );
  }

  /** Trigger a run with the same values, by the user's own rights. */
  async trigger(dag, conf) {
    off(this.again, true);
    this.said.hidden = false;
    try {
      const run = await trigger(dag, conf);
      this.said.replaceChildren(`${dag} is triggered. `, link("See its run", `dags/${part(dag)}/runs/${part(run.dag_run_id)}/plugin/index-build`));
      mark(this.said, "data-wrong", null);
    } catch (refusal) {
      put(this.said, `No run of ${dag} could be triggered: ${refusal.message}`);
      mark(this.said, "data-wrong", "true");
    } finally {
      off(this.again, false);
    }
  }
}
