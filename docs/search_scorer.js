// How the search ranks (html_search_scorer): first the pages that people run roir by, among them those whose headings
// have most of the words. A hit leads to the section with these words. Sphinx's own scorer ranks pages with one word in
// a heading alike, by their titles' letters.

const FOR_MAINTAINERS = /^(architecture|code-map|reference\/(python|control-schema))/;
const TO_LOOK_UP = /^(reference\/|performance|reliability|regressions|comparison|oracle|limits|index$)/;
const A_WORD = 4;

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

/** The section with most of the words, and how many it has; one more if its title has them as they were typed. */
function bestSection(sections, asked, typed) {
  let best = { anchor: "", title: null, found: 0 };
  for (const [anchor, { title, words }] of sections) {
    const alike = [...asked].filter((word) => words.has(word)).length;
    const found = alike + (typed && title?.toLowerCase().includes(typed) ? 1 : 0);
    if (found > best.found) best = { anchor, title, found };
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
    const number = Search._index.docnames.indexOf(page);
    const best = bestSection(Scorer.sections[number], asked, (query ?? "").toLowerCase().trim());
    if (kind === "text" && best.found && best.anchor) {
      result[2] = best.anchor;
      if (best.title) result[1] = `${title} > ${best.title}`;
    }
    return Math.min(score, Scorer.term) + place + A_WORD * best.found;
  },
};
