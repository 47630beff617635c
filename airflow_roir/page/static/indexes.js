// The page Indexes: every index of every database, and what can be done with it.

import { keep } from "./draw.js";
import { NewIndex } from "./new_index.js";
import { SegmentList } from "./segments.js";
import { SetUp } from "./setup.js";
import { ShardList, factsOfShards, warningsOfShards } from "./shards.js";
import { DASH, Poll, Refused, banner, bytes, count, duration, el, followTheme, holdFocus, link, many, mark, off, offerSkip, part, put, question, say, share, since, trigger, zoned } from "./page.js";

followTheme();
offerSkip("Indexes");
const main = document.getElementById("main");
const stale = banner(main);
const title = el("h1", { text: "Indexes", tabindex: -1 });
const sum = el("p", { class: "source" });
const filter = el("input", { type: "search", placeholder: "Filter by name or table", "aria-label": "Filter by name or table", oninput: () => last && (draw(last), sayFound()) });
const said = el("p", { class: "said", role: "status" });
const list = el("div", { class: "databases" });
const STATE = { published: "Published", building: "Building", "not published": "Not published" };
const KINDS = ["missing", "extra", "different", "corrupt", "damaged", "duplicate"];
let last = null;
// Cards keep their nodes, so that an open question or an unfolded part stays as it is.
const cards = new Map();

const looking = el("p", { class: "empty", text: "Looking …" });
list.append(looking);
main.replaceChildren(
  el("header", { class: "head" }, el("div", { class: "title" }, title, sum), el("div", { class: "controls" }, filter)),
  said,
  list,
);

const poll = new Poll({
  address: () => "api/indexes",
  every: (content) => (content.databases.some((one) => one.indexes.some((index) => index.operation)) ? 5 : 15),
  show: (content) => {
    stale.fresh();
    mark(main, "aria-busy", null);
    last = content;
    draw(content);
  },
  old: (reason, since, gone) => {
    mark(main, "aria-busy", null);
    stale.old(reason, since, gone);
  },
});

let found = 0;
let telling = null;

/** How many the filter leaves, once the user has typed. */
function sayFound() {
  clearTimeout(telling);
  telling = setTimeout(() => say(`The filter leaves ${many(found, "index", "indexes")}`), 700);
}

function draw(content) {
  const all = content.databases.flatMap((one) => one.indexes);
  const wanted = filter.value.trim().toLowerCase();
  // A database that refuses has no number of indexes.
  const silent = content.databases.filter((one) => one.trouble && !one.indexes.length).length;
  const answered = content.databases.length - silent;
  put(
    sum,
    [
      answered || (!silent && !content.bare?.length) ? `${many(all.length, "index", "indexes")} in ${many(answered, "database")}` : "",
      silent ? `${many(silent, "database")} can’t be read` : "",
    ].filter(Boolean).join("; "),
  );
  const seen = new Set();
  const sections = content.databases.map((database) => {
    const shown = database.indexes.filter((index) => !wanted || `${index.index} ${index.source ?? ""}`.toLowerCase().includes(wanted));
    const section = sectionOf(database.connection);
    section.show(database, content);
    keepNodes(
      section.list,
      shown.map((index) => {
        const key = `${database.connection} ${index.index}`;
        seen.add(key);
        const card = cards.get(key) ?? new Card();
        cards.set(key, card);
        card.show(index, database.connection, content, database.as_of);
        return card.node;
      }),
    );
    put(section.empty, shown.length || database.trouble ? "" : wanted ? "No index matches the filter." : "No index yet. Trigger rebuild_index to build one.");
    return section.node;
  });
  found = seen.size;
  for (const key of cards.keys()) if (!seen.has(key) && !wanted) cards.delete(key);
  const first = all.length === 0;
  const bare = first ? (content.bare ?? []).map(bareOf) : [];
  keepNodes(list, [...sections, ...bare]);
  for (const setUp of setUps.values()) setUp.allow(content.may.begin);
  // Without a session the check would only repeat what the section says.
  const checked = [...content.databases, ...(content.bare ?? [])].filter((one) => !one.trouble || one.lacks === "schema");
  if (first && content.may.begin) checked.forEach((one) => setUpOf(one.connection).once());
}

const setUps = new Map();

function setUpOf(connection) {
  if (!setUps.has(connection)) setUps.set(connection, new SetUp(connection));
  return setUps.get(connection);
}

const heading = (connection) => el("h2", {}, el("span", { class: "faint", text: "Connection " }), connection);
const bares = new Map();

/** A connection that can't have an index yet, and why. */
function bareOf({ connection, trouble, remedy }) {
  const { button, node } = setUpOf(connection);
  if (!bares.has(connection)) bares.set(connection, { note: el("p", { class: "note warn" }), section: el("section", { class: "database", "aria-label": `Connection ${connection}` }) });
  const { note, section } = bares.get(connection);
  put(note, sentences(trouble, remedy));
  if (!section.contains(button)) section.replaceChildren(el("header", { class: "row ends" }, heading(connection), button), note, node);
  return section;
}

const sentences = (...texts) => texts.filter(Boolean).map((text) => `${text.replace(/^./, (first) => first.toUpperCase())}.`).join(" ");

/** Put these nodes below `parent`, and move only those that aren't in their place. */
function keepNodes(parent, nodes) {
  nodes.forEach((node, n) => parent.children[n] === node || parent.insertBefore(node, parent.children[n] ?? null));
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}

const sections = new Map();

function sectionOf(connection) {
  if (!sections.has(connection)) {
    const trouble = el("p", { class: "note warn", hidden: true });
    const cleanUp = el("button", { type: "button", text: "Clean up" });
    const asks = el("div", { class: "asks" });
    const rows = el("div", { class: "cards" });
    const empty = el("p", { class: "faint" });
    const setUp = setUpOf(connection);
    const build = new NewIndex(connection, start);
    sections.set(connection, {
      list: rows,
      empty,
      node: el("section", { class: "database", "aria-label": `Connection ${connection}` }, el("header", { class: "row ends" }, heading(connection), el("div", { class: "controls" }, build.button, setUp.button, cleanUp)), asks, build.node, trouble, rows, empty, setUp.node),
      show(database, content) {
        trouble.hidden = !database.trouble && !database.as_of;
        mark(rows, "data-aged", database.as_of ? "true" : null);
        put(trouble, noteOn(database));
        build.allow(content.may.rebuild && !(database.trouble && !database.indexes.length), content.dags.rebuild);
        cleanUp.hidden = !content.may.clean_up || Boolean(database.trouble && !database.indexes.length);
        cleanUp.onclick = () =>
          ask(asks, cleanUp, {
            title: "Clean up this database?",
            text: "The clean-up removes ghosts, deltas, and generations whose revert window is over. You can repeat it at any time.",
            verb: "Clean up",
            yes: () => start(content.dags.clean_up, { postgres_conn_id: connection }),
          });
      },
    });
  }
  return sections.get(connection);
}

/** Why the figures aren't of now, and from when they are. */
function noteOn({ trouble, remedy, indexes, as_of: from }) {
  if (trouble && !indexes.length) return sentences(`Not shown: ${trouble}`, remedy);
  const age = from ? `These figures are from ${since(from)}` : "These figures are up to half a minute old";
  return trouble ? `${age}: ${trouble}.` : from ? `${age}: a look at this database takes long.` : "";
}

class Card {
  constructor() {
    this.name = el("h3", { tabindex: -1 });
    // A button is of its verb as long as it is there: what has the focus doesn't become another.
    this.verbs = new Map();
    this.chip = el("span", { class: "chip" });
    this.source = el("p", { class: "source" });
    this.now = el("p", { class: "source" });
    this.buttons = el("div", { class: "controls" });
    this.asks = el("div", { class: "asks" });
    this.warnings = el("ul", { class: "warnings" });
    this.facts = el("dl", { class: "facts" });
    this.generations = el("tbody");
    this.shards = new ShardList();
    this.segments = new SegmentList();
    this.node = el(
      "article",
      { class: "panel index" },
      el("header", { class: "head" }, el("div", { class: "title" }, el("div", { class: "row" }, this.name, this.chip), this.source, this.now), this.buttons),
      this.asks,
      this.warnings,
      this.facts,
      (this.queries = el("ol", { class: "list", "aria-label": "How to query it" })),
      this.shards.node,
      this.segments.node,
      (this.unfolds = el(
        "details",
        {},
        (this.summary = el("summary")),
        (this.region = el(
          "div",
          { class: "scrolls", tabindex: 0, role: "region" },
          el(
            "table",
            {},
            el("caption", { class: "unseen", text: "Generations of the index" }),
            el("thead", {}, el("tr", {}, ...["State", "Size", "Published", "Replaced", "Kept until"].map((text) => el("th", { scope: "col", text })))),
            this.generations,
          ),
        )),
      )),
    );
  }

  show(index, connection, content, from) {
    put(this.name, index.index);
    mark(this.node, "aria-label", index.index);
    mark(this.region, "aria-label", `Generations of ${index.index}`);
    // A first build is all that there is of an index: its state is the index's.
    const doing = index.state_of_operation;
    const first = index.state === "building" ? doing : null;
    const word = first && first.name !== "running" ? first.word : (STATE[index.state] ?? index.state);
    // It may have been dropped since.
    const aged = index.aged && from;
    mark(this.chip, "data-status", aged ? "aged" : (first?.name ?? { published: "completed", building: "running" }[index.state] ?? "aborted"));
    put(this.chip, aged ? `${word} at ${zoned(from)}` : word);
    put(this.source, index.definition);
    const key = JSON.stringify([index.run, index.operation, doing?.word, doing?.why]);
    if (this.linked !== key) {
      this.linked = key;
      this.now.replaceChildren(...(index.operation ? [doing ? `Operation ${index.operation} (${doing.noun}): ${doing.why || doing.word.toLowerCase()}. ` : `Operation ${index.operation} isn’t finished yet. `, runOf(index)].filter(Boolean) : []));
      this.now.hidden = !index.operation;
    }
    this.showButtons(index, connection, content);
    const warnings = [...(doing?.long_pause ? [doing.long_pause] : []), ...(index.warnings ?? []), ...warningsOfShards(index)];
    keep(this.warnings, warnings, () => el("li"), (item, text) => put(item, text));
    this.warnings.hidden = warnings.length === 0;
    this.shards.show(index);
    this.segments.show(index);
    const facts = factsOf(index);
    this.facts.hidden = facts.length === 0;
    keep(
      this.facts,
      facts,
      () => el("div", {}, el("dt"), el("dd"), el("dd", { class: "faint" })),
      (fact, [name, value, more, state]) => {
        put(fact.children[0], name);
        put(fact.children[1], value);
        put(fact.children[2], more ?? "");
        mark(fact.children[1], "data-state", state ?? null);
      },
    );
    keep(this.queries, index.queries ?? [], () => el("li", {}, el("code")), (item, text) => put(item.firstChild, text));
    this.queries.hidden = !index.queries?.length;
    const generations = index.generations ?? [];
    put(this.summary, many(generations.length, "generation"));
    this.unfolds.hidden = generations.length === 0;
    keep(
      this.generations,
      generations,
      () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td"), el("td"), el("td")),
      (row, one) => {
        const moment = (at) => (at ? zoned(at, true) : DASH);
        [one.status, bytes(one.bytes), moment(one.published_at), moment(one.retired_at), moment(one.drop_after)].forEach((text, n) => put(row.children[n], text));
      },
    );
  }

  showButtons(index, connection, { may, dags }) {
    const conf = { index: index.index, postgres_conn_id: connection };
    const busy = Boolean(index.operation);
    const paused = index.state_of_operation?.name === "paused";
    const { left, stray } = index.state_of_operation ?? {};
    const published = index.state === "published" || (index.generations ?? []).some((one) => one.status === "active");
    const actions = [
      index.continues && (may.control || !paused) && {
        verb: "Continue",
        title: "Continue this operation?",
        text: `No run drives operation ${index.operation}, and none will. ${index.continues.dag_id} is triggered with the operation’s present options, and continues after the last committed batch.${paused ? ` ${dags.control} lifts the pause.` : ""}`,
        // Without a run the pause stays, and its reason.
        yes: async () => (await start(index.continues.dag_id, index.continues.conf)) && paused && lift(dags.control, conf, index.continues.dag_id),
      },
      may.control && stray && {
        verb: "Pause",
        title: "Pause this operation?",
        text: `A process drives operation ${index.operation} whose run isn’t in this Airflow: it ends after its open batches. Then this page can continue the operation.`,
        yes: () => start(dags.control, { ...conf, action: "pause", reason: "on the page Indexes" }),
      },
      may.control && (left || stray) && {
        verb: "Abort",
        danger: true,
        title: "Abort this operation?",
        text: `Operation ${index.operation} loses its work so far. The table and the published index stay as they are.`,
        yes: () => start(dags.control, { ...conf, action: "abort", reason: "on the page Indexes" }),
      },
      may.rebuild && published && {
        verb: "Rebuild",
        off: busy,
        title: "Rebuild this index?",
        text: `${dags.rebuild} builds the index again while users read and write. Readers see the new generation once it is verified. ${win(index)}`.trim(),
        yes: () => start(dags.rebuild, conf),
      },
      may.verify && published && {
        verb: "Verify",
        off: busy,
        title: "Verify this index?",
        text: `${dags.verify} compares the index with its table, row by row where sums differ. It changes nothing.`,
        yes: () => start(dags.verify, conf),
      },
      may.verify && published && index.verified?.differences_left > 0 && {
        verb: "Repair",
        off: busy,
        title: "Repair this index?",
        text: `${dags.verify} compares the index with its table, and repairs each difference in a short transaction.`,
        yes: () => start(dags.verify, { ...conf, repair: true }),
      },
      may.control && index.revert_until && new Date(index.revert_until) > new Date() && {
        verb: "Revert",
        off: busy,
        danger: true,
        title: "Revert the last rebuild?",
        text: `Readers see the replaced generation again. Every write has maintained that generation, so nothing is lost. You can revert until ${zoned(index.revert_until, true)}.`,
        yes: () => start(dags.control, { ...conf, action: "revert", reason: "on the page Indexes" }),
      },
    ].filter(Boolean);
    const buttons = actions.map((action) => {
      const button = this.verbs.get(action.verb) ?? el("button", { type: "button", text: action.verb });
      this.verbs.set(action.verb, button);
      mark(button, "aria-label", `${action.verb} ${index.index}`);
      off(button, action.off, "This index has an unfinished operation");
      button.onclick = () => ask(this.asks, button, action, this.name);
      return button;
    });
    holdFocus(this.buttons, () => keepNodes(this.buttons, buttons), () => [this.name]);
  }
}

function win({ bloat: b }) {
  return b?.win_bytes > 0 ? `The rebuild wins about ${bytes(b.win_bytes)} (${share(b.win_share)}).` : "";
}

function bloatOf(b) {
  if (!b) return "";
  const win = b.win_bytes === null ? (b.note ?? "not known") : b.win_bytes > 0 ? `a rebuild wins ${bytes(b.win_bytes)}` : "a rebuild wins too little";
  return [b.bytes ? bytes(b.bytes) : "", b.ghosts ? many(b.ghosts, "ghost") : "", win].filter(Boolean).join(", ");
}

function factsOf(index) {
  const { verified: v, bloat: b } = index;
  const ago = (at) => (at ? `${duration((Date.now() - new Date(at)) / 1000)} ago` : DASH);
  const found = v ? KINDS.filter((kind) => v[kind]).map((kind) => `${count(v[kind])} ${kind}`) : [];
  if (v?.repaired) found.push(`${count(v.repaired)} repaired`);
  return [
    index.rows !== null && ["Entries", count(index.rows)],
    index.bytes && ["Size", bytes(index.bytes), index.source_bytes ? `${share((index.bytes ?? 0) / index.source_bytes)} of its source (${bytes(index.source_bytes)})` : ""],
    index.published_at && ["Built", ago(index.published_at), index.published_at ? zoned(index.published_at, true) : ""],
    (v || index.published_at) && [
      "Verified",
      v ? v.outcome : "never",
      v ? [ago(v.at), ...found].join(", ") : "",
      v ? (v.differences_left ? "bad" : "good") : null,
    ],
    index.published_at && ["Revert", index.revert_until && new Date(index.revert_until) > new Date() ? `until ${zoned(index.revert_until, true)}` : "not possible"],
    b && ["Bloat", share(b.share), bloatOf(b)],
    ...factsOfShards(index),
  ].filter(Boolean);
}

/** The page of the DAG run that drives an index's operation. */
const runOf = ({ index, run }) =>
  run && link("Watch it", `dags/${part(run.dag_id)}/runs/${part(run.run_id)}/plugin/index-build`, { "aria-label": `Watch it: ${index}` });

function ask(place, back, what, instead = title) {
  const close = () => {
    place.replaceChildren();
    (back.checkVisibility() ? back : instead).focus();
  };
  place.replaceChildren(question({ ...what, close }));
}

/** Lift a pause for a run that was triggered; say only why it stays. */
async function lift(control, conf, triggered) {
  try {
    await trigger(control, { ...conf, action: "resume" });
  } catch (refusal) {
    put(said, `${triggered} is triggered, and waits, as ${control}, which lifts the pause, couldn't be triggered: ${refusal.message}`);
    mark(said, "data-wrong", "true");
  }
}

/** Trigger a DAG, and say so. */
async function start(dag, conf) {
  try {
    const run = await trigger(dag, conf);
    const id = run.dag_run_id;
    said.replaceChildren(`${dag} is triggered. `, link("See its run", `dags/${part(dag)}/runs/${part(id)}`));
    mark(said, "data-wrong", null);
    return true;
  } catch (refusal) {
    put(said, refusal instanceof Refused ? refusal.message : String(refusal));
    mark(said, "data-wrong", "true");
    return false;
  } finally {
    poll.now();
  }
}

poll.now();
