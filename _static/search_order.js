// The order of search results: Sphinx's own scores, with a chapter before its lab and a heading before a mention.
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score + (page.startsWith("book/") ? 8 : 0) + (/^book\/\d/.test(page) ? 4 : 0) + (anchor ? 3 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
