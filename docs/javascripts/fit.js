// A table that is wider than its page shows each row as a list: the name of a column, then its value.
// Short code in a sentence stays in one line: a flag is not divided at its hyphens.
// So does a flag in a longer command.
// Comments that are aligned in a column move to their commands where the lines are too long for the page.
"use strict";

const TABLES = ".md-typeset table:not([class])";
const SHORT_CODE = 24; // characters; fits into a phone

function nameCells(table) {
  const names = [...table.querySelectorAll("thead th")].map(head => head.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, number) => (cell.dataset.column = names[number] || ""));
  }
}

function fitTables() {
  for (const table of document.querySelectorAll(TABLES)) {
    delete table.dataset.rowsAsLists;
    // The theme wraps tables after this script has started: measure against the text around them.
    let place = table.parentElement;
    while (place.matches(".md-typeset__table, .md-typeset__scrollwrap")) place = place.parentElement;
    if (table.getBoundingClientRect().width > place.clientWidth + 1) table.dataset.rowsAsLists = "";
  }
}

function textsOf(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  return texts;
}

function keepWordsWhole(code) {
  for (const text of textsOf(code)) {
    const words = text.data.split(/(\S*-\S*)/);
    if (words.length === 1) continue;
    text.replaceWith(...words.filter(Boolean).map(word => {
      if (!word.includes("-") || word.length > SHORT_CODE) return word;
      const whole = document.createElement("span");
      whole.style.whiteSpace = "nowrap";
      whole.textContent = word;
      return whole;
    }));
  }
}

function fitComments() {
  for (const code of document.querySelectorAll(".md-typeset pre > code")) {
    for (const text of textsOf(code)) {
      text.aligned ??= text.data;
      text.data = text.aligned;
    }
    code.style.whiteSpace = "pre";
    const isTooWide = code.scrollWidth > code.clientWidth + 1;
    code.style.whiteSpace = "";
    if (isTooWide) for (const text of textsOf(code)) text.data = text.aligned.replace(/ {3,}(?=# )/g, "  ");
  }
}

for (const code of document.querySelectorAll(".md-typeset code")) {
  if (code.parentElement.tagName !== "PRE" && code.textContent.length <= SHORT_CODE) code.style.whiteSpace = "nowrap";
  else keepWordsWhole(code);
}
document.querySelectorAll(TABLES).forEach(nameCells);
fitTables();
fitComments();
addEventListener("resize", fitTables);
addEventListener("resize", fitComments);
