// Asks the search of built pages, as a browser would: reads a folder and queries as JSON, prints what each one finds.
const fs = require("fs");
const vm = require("vm");

const { folder, queries } = JSON.parse(fs.readFileSync(0, "utf8"));
globalThis.window = globalThis;
const scripts = ["language_data.js", "search_sections.js", "search.js"];
const text = scripts.map((name) => fs.readFileSync(`${folder}/_static/${name}`, "utf8")).join("\n");
vm.runInThisContext(`${text}\nglobalThis.find = roirSearch.find;`);
console.log(JSON.stringify(queries.map((query) => globalThis.find(query))));
