// How the search ranks (html_search_scorer): by the words that a page's headings have, the rare ones most; pages that
// people run roir by come before those to look something up, and those before the ones for maintainers. A hit leads to
// the section with the words. Sphinx's own scorer ranks all pages with a word in a heading alike, by their titles.

const FOR_MAINTAINERS = /^(architecture|code-map|reference\/(python|control-schema))/;
const TO_LOOK_UP = /^(reference\/|performance|reliability|regressions|comparison|oracle|limits|shards|index$)/;
const A_WORD = 3;

/** The words of a text, stemmed as those of the index. */
function wordsOf(text) {
  const stemmer = new Stemmer();
  return new Set(
    splitQuery(text.toLowerCase())
      .filter((word) => !stopwords.has(word))
      .map((word) => stemmer.stemWord(word)),
  );
}

/** The sections of each page: anchor, title and words, those of its index entries (docs/search_words.py) included. */
function sectionsOf(index) {
  const pages = index.docnames.map(() => new Map());
  const put = (page, id, text, title) => {
    const anchor = id ? `#${id}` : "";
    if (!pages[page].has(anchor)) pages[page].set(anchor, { title: null, words: new Set() });
    const section = pages[page].get(anchor);
    section.title ??= title;
    wordsOf(text).forEach((word) => section.words.add(word));
  };
  for (const [title, places] of Object.entries(index.alltitles)) for (const [page, id] of places) put(page, id, title, title);
  for (const [entry, places] of Object.entries(index.indexentries)) for (const [page, id] of places) put(page, id, entry, null);
  return pages;
}

/** How much each word of a heading counts: the fewer pages have it in one, the more. */
function weightsOf(pages) {
  const counts = new Map();
  for (const sections of pages) {
    const all = new Set([...sections.values()].flatMap(({ words }) => [...words]));
    all.forEach((word) => counts.set(word, (counts.get(word) ?? 0) + 1));
  }
  return (word) => (counts.has(word) ? Math.log(1 + pages.length / counts.get(word)) : 0);
}

/** The section that is most about the words, and how much; of equal ones the one with the fewest words beside them. */
function bestSection(sections, asked, typed, weight) {
  let best = { anchor: "", title: null, found: 0, size: 0 };
  for (const [anchor, { title, words }] of sections) {
    const is = title?.toLowerCase() ?? "";
    const phrase = typed && is.includes(typed) ? (is === typed ? 2 : 1) : 0;
    const found = [...asked].reduce((sum, word) => sum + (words.has(word) ? weight(word) : 0), phrase);
    if (found > best.found || (found === best.found && words.size < best.size)) best = { anchor, title, found, size: words.size };
  }
  return best;
}

var Scorer = {
  objNameMatch: 3,
  objPartialMatch: 1,
  objPrio: { 0: 0, 1: 0, 2: -2 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: (result) => {
    const [page, title, anchor, , score, , kind] = result;
    const place = FOR_MAINTAINERS.test(page) ? -4 : TO_LOOK_UP.test(page) ? 0 : 4;
    if (kind === "index") return score;
    if (kind === "object") return score + place;
    const query = new URLSearchParams(window.location.search).get("q");
    const asked = wordsOf(query ?? "");
    Scorer.sections ??= sectionsOf(Search._index);
    Scorer.weight ??= weightsOf(Scorer.sections);
    const number = Search._index.docnames.indexOf(page);
    const best = bestSection(Scorer.sections[number], asked, (query ?? "").toLowerCase().trim(), Scorer.weight);
    if (kind === "text" && best.found && best.anchor) {
      result[2] = best.anchor;
      if (best.title) result[1] = `${title} > ${best.title}`;
    }
    return Math.min(score, Scorer.term) + place + A_WORD * best.found;
  },
};
