// The search of the pages, in place of Sphinx's, which finds nothing unless a page has every word. It ranks sections by
// the words that they have, the rare ones most, and shows the paragraph that has most of them. `roirSections` is made by
// docs/search_sections.py; Sphinx gives the stop words and the stemmer.

const roirSearch = (() => {
  // Pages that people run roir by come before those to look something up, and those before the ones for maintainers.
  const FOR_MAINTAINERS = /^(architecture|code-map|regressions|reference\/(python|sql|control-schema))/;
  const TO_LOOK_UP = /^(reference\/|performance|reliability|comparison|oracle|limits|index$)/;
  const IN_TITLE = 2, IN_TITLE_ABOVE = 0.8, IN_TEXT = 0.7, IN_BEST_BLOCK = 1.5, IN_PHRASE = 2, LONG_BLOCK = 80;
  const MOST_RESULTS = 30, MOST_OF_A_PAGE = 3, WORTH_SHOWING = 0.15;
  const EXCERPT = 280, BEFORE_THE_WORD = 80;
  const TOKEN = /[\p{L}\p{N}_]+(?:[.'’][\p{L}\p{N}_]+)*/gu;

  const stems = new Map();
  const stemmer = new Stemmer();
  const stemOf = (word) => {
    if (!stems.has(word)) stems.set(word, stemmer.stemWord(word.replace(/['’]s$/, "")));
    return stems.get(word);
  };

  /** The stems of a text without stop words, also those of the parts of a name such as `roir.pause` or `max_rows`. */
  const wordsOf = (text) =>
    (text.toLowerCase().match(TOKEN) ?? [])
      .map((word) => word.replace("’", "'"))
      .flatMap((word) => (/[._]/.test(word) ? [word, ...word.split(/[._]/)] : [word]))
      .filter((word) => word && !stopwords.has(word))
      .map(stemOf);

  const sections = roirSections.map((section) => ({
    ...section,
    // Phrases, which count more if all of one is asked.
    phrases: [section.title, ...section.words.split(", ")].map((one) => one.toLowerCase()).filter((one) => one.includes(" ")),
    titleWords: new Set(wordsOf(`${section.title} ${section.words}`)),
    aboveWords: new Set(wordsOf(section.above)),
    blockWords: section.blocks.map((texts) => new Set(texts.flatMap(wordsOf))),
  }));

  // In how many sections each word is.
  const counts = new Map();
  for (const { titleWords, blockWords } of sections)
    for (const word of new Set([titleWords, ...blockWords].flatMap((words) => [...words])))
      counts.set(word, (counts.get(word) ?? 0) + 1);

  /** The words to look for in place of one that was asked: itself, or if no section has it, those that begin with it. */
  const known = (word) =>
    counts.has(word) ? [word] : word.length < 3 ? [] : [...counts.keys()].filter((other) => other.startsWith(word));

  /** What was asked, as a list of alternatives with their weight: the fewer sections have one, the more it counts. */
  const asked = (query) =>
    [...new Set(wordsOf(query))]
      .map((word) => new Set(known(word)))
      .filter((words) => words.size)
      .map((words) => ({ words, weight: Math.log(1 + sections.length / Math.max(...[...words].map((w) => counts.get(w)))) }));

  const sum = (terms, has) => terms.reduce((total, { words, weight }) => total + ([...words].some(has) ? weight : 0), 0);

  /** How much a section is about the terms, and the block that has most of them; -1: only the title has any. */
  const rated = (section, terms, query) => {
    const { titleWords, aboveWords, blockWords } = section;
    // A long list of names has many words, and is about none of them.
    const ofBlocks = blockWords.map((words) => sum(terms, (word) => words.has(word)) / (1 + words.size / LONG_BLOCK));
    const most = Math.max(0, ...ofBlocks);
    const inText = (word) => blockWords.some((words) => words.has(word));
    const inTitle = sum(terms, (word) => titleWords.has(word));
    const own = IN_TITLE * inTitle + IN_TEXT * sum(terms, inText) + IN_BEST_BLOCK * most;
    const above = own && IN_TITLE_ABOVE * sum(terms, (word) => aboveWords.has(word));
    const found = sum(terms, (word) => titleWords.has(word) || aboveWords.has(word) || inText(word));
    const share = found / sum(terms, () => true);
    const place = FOR_MAINTAINERS.test(section.page) ? 0.5 : TO_LOOK_UP.test(section.page) ? 0.75 : 1;
    // A title that has little else than what was asked.
    const about = titleWords.size ? inTitle * Math.min(1, terms.length / titleWords.size) : 0;
    const isIn = new Set(section.phrases.filter((one) => query.includes(one)).flatMap(wordsOf));
    const phrase = IN_PHRASE * sum(terms, (word) => isIn.has(word));
    return { section, block: most ? ofBlocks.indexOf(most) : -1, score: (own + above + about + phrase) * share * place };
  };

  /** The part of a text that has most of the terms, about EXCERPT characters. */
  const excerptOf = (text, terms) => {
    if (text.length <= EXCERPT) return text;
    const places = [...text.matchAll(TOKEN)]
      .filter(([word]) => wordsOf(word).some((one) => terms.some(({ words }) => words.has(one))))
      .map(({ index }) => index);
    const within = (begin) => places.filter((at) => at >= begin && at < begin + EXCERPT - BEFORE_THE_WORD).length;
    const first = places.reduce((best, at) => (within(at) > within(best) ? at : best), places[0] ?? 0);
    const begin = first <= BEFORE_THE_WORD ? 0 : text.indexOf(" ", first - BEFORE_THE_WORD) + 1;
    const end = begin + EXCERPT >= text.length ? text.length : text.lastIndexOf(" ", begin + EXCERPT);
    return (begin ? "… " : "") + text.slice(begin, end) + (end < text.length ? " …" : "");
  };

  /** The best sections for a query, each with the paragraph that has most of its words. */
  const find = (query) => {
    const terms = asked(query);
    const all = sections.map((section) => rated(section, terms, query.toLowerCase())).filter(({ score }) => score > 0);
    all.sort((a, b) => b.score - a.score);
    const ofPage = new Map();
    return all
      .filter(({ section: { page }, score }) => {
        ofPage.set(page, (ofPage.get(page) ?? 0) + 1);
        return ofPage.get(page) <= MOST_OF_A_PAGE && score >= WORTH_SHOWING * all[0].score;
      })
      .slice(0, MOST_RESULTS)
      .map(({ section, block, score }) => ({
        address: section.address,
        title: section.above ? `${section.above} > ${section.title}` : section.title,
        excerpt: excerptOf(section.blocks[Math.max(block, 0)]?.[0] ?? "", terms),
        score,
      }));
  };

  /** True for a word of a text that the query asked for. */
  const isAsked = (word, query) => {
    const terms = asked(query);
    return wordsOf(word).some((one) => terms.some(({ words }) => words.has(one)));
  };

  return { find, isAsked };
})();

if (typeof Search !== "undefined") {
  Search.query = (query) => {
    const results = roirSearch.find(query);
    for (const { address, title, excerpt } of results) {
      const item = document.createElement("li");
      const link = item.appendChild(document.createElement("a"));
      link.href = address;
      link.textContent = title;
      const context = item.appendChild(document.createElement("p"));
      context.className = "context";
      for (const part of excerpt.split(/([\p{L}\p{N}_'’]+)/u)) {
        if (!roirSearch.isAsked(part, query)) context.append(part);
        else context.appendChild(Object.assign(document.createElement("span"), { className: "highlighted", textContent: part }));
      }
      Search.output.appendChild(item);
    }
    document.getElementById("search-progress")?.replaceChildren();
    _finishSearch(results.length);
  };
}
