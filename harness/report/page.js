"use strict";
// Tables from the page's JSON: filters and sorting work on the columns, and only a part of the rows becomes elements, so
// that thousands of rows stay quick. Texts are set as text, never as markup.
(() => {
  const STEP = 200;
  // The tables whose rows links can name: one line for each stored row.
  const NAMED = ["measurements", "ratios", "training", "training-ratios"];
  const collator = new Intl.Collator("en", { numeric: true });

  const make = (name, properties = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key in element && key !== "role") element[key] = value;
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  };

  const text = (column, row) => {
    if (column.kind === "number") return column.t[row];
    const found = column.d[column.i[row]];
    return column.kind === "place" ? `${found}:${column.l[row]}` : found;
  };

  // The place of each text among all, once for a column: comparing numbers is much quicker than comparing texts.
  const ranks = (column) => {
    if (!column.ranks) {
      const order = column.d.map((_, index) => index).sort((a, b) => collator.compare(column.d[a], column.d[b]));
      column.ranks = [];
      order.forEach((index, rank) => { column.ranks[index] = rank; });
    }
    return column.ranks;
  };

  const comparison = (column, sign) => {
    if (column.kind === "number") {
      // Cells without a number stay at the end, whichever way.
      return (a, b) => {
        const [x, y] = [column.v[a], column.v[b]];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (x - y);
      };
    }
    const rank = ranks(column);
    const line = column.l || [];
    return (a, b) => sign * (rank[column.i[a]] - rank[column.i[b]] || (line[a] || 0) - (line[b] || 0));
  };

  class DataTable {
    constructor(host, data) {
      this.data = data;
      this.all = Array.from({ length: data.rows }, (_, row) => row);
      this.sort = null;
      this.limit = STEP;
      this.selects = new Map();
      this.build(host);
      this.update();
    }

    build(host) {
      const { name, title, columns } = this.data;
      const controls = make("div", { className: "controls" });
      for (const column of columns.filter((one) => one.filter)) {
        const counts = new Map();
        for (const index of column.i) counts.set(index, (counts.get(index) || 0) + 1);
        if (counts.size < 2) continue;
        const select = make("select", {}, make("option", { value: "" }, `all (${counts.size})`));
        const rank = ranks(column);
        for (const index of [...counts.keys()].sort((a, b) => rank[a] - rank[b])) {
          select.append(make("option", { value: String(index) }, `${column.d[index]} (${counts.get(index)})`));
        }
        select.addEventListener("change", () => this.refresh());
        this.selects.set(column, select);
        controls.append(make("label", {}, column.title, select));
      }
      this.search = make("input", { type: "search", placeholder: "words in any column" });
      this.search.addEventListener("input", () => this.refresh());
      const reset = make("button", { type: "button" }, "Reset filters");
      reset.addEventListener("click", () => { this.clear(); this.refresh(); });
      controls.append(make("label", {}, "search", this.search), reset);

      this.count = make("p", { className: "count", role: "status" });
      this.body = make("tbody");
      this.heads = columns.map((column, index) => {
        const button = make("button", { type: "button" }, column.title);
        button.addEventListener("click", () => this.sortBy(index));
        const head = make("th", { scope: "col", "aria-sort": "none" }, button);
        if (column.kind === "number") head.className = "number";
        return head;
      });
      const table = make("table", { "aria-labelledby": `${name}-title` },
        make("thead", {}, make("tr", {}, ...this.heads)), this.body);
      const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Table: ${title}` }, table);
      this.more = make("div", { className: "more" });
      host.append(controls, this.count, scroll, this.more);
      if (this.data.rows < 12) controls.hidden = true;
    }

    clear() {
      for (const select of this.selects.values()) select.value = "";
      this.search.value = "";
    }

    refresh() {
      this.limit = STEP;
      this.update();
    }

    sortBy(index) {
      const up = this.sort && this.sort.index === index && this.sort.sign === 1;
      this.sort = { index, sign: up ? -1 : 1 };
      this.heads.forEach((head, place) => {
        head.setAttribute("aria-sort", place !== index ? "none" : up ? "descending" : "ascending");
      });
      this.refresh();
    }

    haystack(row) {
      this.hay ??= [];
      this.hay[row] ??= this.data.columns.map((column) => text(column, row)).join("\n").toLowerCase();
      return this.hay[row];
    }

    update() {
      const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = [...this.selects].filter(([, select]) => select.value !== "");
      this.rows = this.all.filter((row) =>
        chosen.every(([column, select]) => column.i[row] === Number(select.value)) &&
        words.every((word) => this.haystack(row).includes(word)));
      if (this.sort) this.rows.sort(comparison(this.data.columns[this.sort.index], this.sort.sign));
      this.body.replaceChildren();
      this.append(0);
    }

    append(from) {
      const part = document.createDocumentFragment();
      for (const row of this.rows.slice(from, this.limit)) part.append(this.line(row));
      this.body.append(part);
      const shown = Math.min(this.limit, this.rows.length);
      const format = (number) => number.toLocaleString("en");
      const of = this.rows.length === this.data.rows ? "" : ` (${format(this.data.rows)} without filters)`;
      this.count.textContent = shown === this.rows.length
        ? `${format(shown)} ${shown === 1 ? "row" : "rows"}${of}`
        : `the first ${format(shown)} of ${format(this.rows.length)} rows${of}`;
      this.more.replaceChildren();
      const left = this.rows.length - shown;
      if (left > 0) {
        const sizes = left > STEP ? [STEP, left] : [left];
        for (const size of sizes) {
          const label = size === left ? `Show all ${format(this.rows.length)}` : `Show ${size} more`;
          const button = make("button", { type: "button" }, label);
          button.addEventListener("click", () => { this.limit = shown + size; this.append(shown); });
          this.more.append(button);
        }
      }
    }

    line(row) {
      const line = make("tr");
      for (const column of this.data.columns) {
        const cell = make("td");
        const content = text(column, row);
        if (column.kind === "place") {
          if (NAMED.includes(this.data.name)) line.id = `row-${content}`;
          cell.append(make("a", { href: `${column.h[column.i[row]]}#L${column.l[row]}` }, content));
        } else if (column.kind === "status" || column.title === "status" || column.title === "change") {
          cell.append(make("span", { className: "badge", "data-value": content }, content));
        } else {
          cell.textContent = content;
        }
        if (column.kind === "number") cell.className = "number";
        if (column.wide) cell.className = content.length > 30 ? "wide" : "wide short";
        line.append(cell);
      }
      return line;
    }

    find(place) {
      const column = this.data.columns.find((one) => one.kind === "place");
      return column ? this.all.findIndex((row) => text(column, row) === place) : -1;
    }

    reveal(place) {
      const row = this.find(place);
      if (!this.rows.includes(row)) { this.clear(); this.update(); }
      const at = this.rows.indexOf(row);
      if (at >= this.limit) { const from = this.limit; this.limit = at + 1; this.append(from); }
      const line = this.body.children[at];
      for (const old of document.querySelectorAll("tr.target")) old.classList.remove("target");
      line.classList.add("target");
      line.tabIndex = -1;
      line.focus({ preventScroll: true });
      line.scrollIntoView({ block: "center", inline: "start" });
    }
  }

  const tables = JSON.parse(document.getElementById("tables").textContent).map((data) =>
    new DataTable(document.querySelector(`[data-table="${data.name}"]`), data));
  const follow = () => {
    if (!location.hash.startsWith("#row-")) return;
    let place = "";
    try { place = decodeURIComponent(location.hash.slice(5)); } catch { return; }
    const table = tables.find((one) => NAMED.includes(one.data.name) && one.find(place) >= 0);
    if (table) table.reveal(place);
  };
  window.addEventListener("hashchange", follow);
  // A second click on the same link changes no hash.
  document.addEventListener("click", (event) => {
    const link = event.target.closest ? event.target.closest("a.to-row") : null;
    if (link && link.getAttribute("href") === location.hash) follow();
  });
  follow();
})();
