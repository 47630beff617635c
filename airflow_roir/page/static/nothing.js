// The page Index build of a run without an operation.

import { Failures } from "./failures.js";
import { el, link, mark, put, say } from "./page.js";
import { Values } from "./values.js";

export const NOTHING = "nothing";

/** A run that hasn't begun an operation, has failed before, or is about something else; or its database is away. */
export class Nothing {
  constructor() {
    this.key = NOTHING;
    this.failures = new Failures();
    this.values = new Values();
    this.title = el("h1", { tabindex: -1 });
    this.text = el("p");
    this.more = el("div");
    this.node = el("article", {}, el("div", { class: "empty" }, this.title, this.text, this.more), this.failures.node, this.values.node);
  }

  show(content) {
    const { run, troubles, failures = [] } = content;
    // Of a DAG that is gone a run stays as it was for ever.
    const waits = !run.has_ended && (run.state === "running" || run.state === "queued");
    const failed = !waits && failures.length > 0;
    put(this.title, waits ? "No index build yet" : !failed ? "No index build" : run.state === "failed" ? "This run has failed" : "This run can't go on");
    put(this.text, waits ? "This page shows the build as soon as the run has prepared one." : this.ended(content, failed));
    this.text.hidden = !this.text.textContent;
    mark(this.node, "class", failed ? "of-failed-run" : null);
    const rest = [run.switch_off && waits, ...troubles].join();
    // Its link keeps the focus.
    if (this.rest !== rest) {
      this.more.replaceChildren(
        ...(run.switch_off && waits ? [el("p", { text: `The switch of DAG ${run.dag_id} is off. Turn it on: until then Airflow starts no task of this run.` })] : []),
        ...troubles.map((text) => el("p", { class: "faint", text: `Not searched: ${text}.` })),
        el("p", {}, link("All indexes", "plugin/indexes")),
      );
      this.rest = rest;
    }
    if (this.spoken !== this.title.textContent) say(this.title.textContent);
    this.spoken = this.title.textContent;
    this.failures.show(content);
    this.values.show(failures.length > 0 || wantsIndex(content) ? run.values : {});
  }

  /** What a run that has ended has to do with an index, as far as that is known. */
  ended({ troubles, looked_in: ids, wanted }, failed) {
    if (failed) return wanted && troubles.length === 0 ? `It ended before it began to work on ${wanted}.` : "";
    if (ids?.length) return `This run has no operation in the databases of ${ids.join(", ")}. The page looks only at the connections that the option connections of Airflow's section [roir] names.`;
    if (troubles.length > 0) return `This run has ended. Its work${wanted ? ` on ${wanted}` : ""} can't be shown now.`;
    return wanted ? `This run ended before it began to work on ${wanted}. The logs of its tasks say why, unless a user marked one. Clear the run's first task with Downstream, or trigger a run for the index.` : "This run neither builds nor verifies an index.";
  }

  leave() {}

  takeFocus() {
    this.title.focus();
  }
}

const wantsIndex = ({ run, looked_in: ids }) => !ids?.length && Boolean(run.values?.index);
