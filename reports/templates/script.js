(() => {
  "use strict";
  const make = (tag, text = "", about = {}) => Object.assign(document.createElement(tag), { textContent: text }, about);

  // A link to a part of the page opens the folds around it.
  const reveal = () => {
    const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = part; fold; fold = fold.parentElement) if (fold.tagName === "DETAILS") fold.open = true;
    if (part) part.scrollIntoView();
  };
  addEventListener("hashchange", reveal);

  // Tables with the class "sortable" are sorted by a click on a head.
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[table.tHead.rows.length - 1].cells].forEach((head, column) => {
      const button = make("button", "", { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      button.onclick = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        const order = (a, b) => {
          const [x, y] = [key(a), key(b)];
          const apart = x === "" || y === "" ? (x === "") - (y === "") : isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
          return down ? -apart : apart;
        };
        for (const body of table.tBodies) body.append(...[...body.rows].sort(order));
      };
    });
  }

  // The selects of a box with the class "filters" hide the rows of the table after it that differ.
  for (const box of document.querySelectorAll(".filters[data-for]")) {
    const table = document.getElementById(box.dataset.for);
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    const selects = box.dataset.columns.split(" ").map((column) => {
      const values = [...new Set(rows.map((row) => row.dataset[column]))];
      const select = make("select");
      select.append(make("option", "all", { value: "" }), ...values.map((value) => make("option", value, { value })));
      const label = make("label", column + " ");
      label.append(select);
      box.append(label);
      return [column, select];
    });
    box.onchange = () => {
      for (const row of rows) row.hidden = selects.some(([column, select]) => select.value && row.dataset[column] !== select.value);
    };
  }

  // All cases of an implementation, from the file beside the pages.
  let cases;
  const load = (address) => (cases ??= new Promise((done, failed) => {
    window.flashproofCases = (packed) => {
      const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
      new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json().then(done, failed);
    };
    document.head.append(make("script", "", { src: address, onerror: () => failed(new Error(address + " is not there")) }));
  }));
  const SHOWN = 50;
  const show = async (place) => {
    place.replaceChildren(make("p", "loading …"));
    let data;
    try { data = await load(place.dataset.file); } catch (error) { place.replaceChildren(make("p", `Not loaded: ${error.message}`)); return; }
    const word = (column, index) => column === "again" ? word("command", index) + word("case", index) : data.words[data[column][index]];
    // The gravest status is first, and then the largest rho. A rho that is not finite is larger than all others.
    const gravity = ["passed", "refused", "known defect", "failed"];
    const size = (rho) => rho === "" ? -1 : Number.isFinite(+rho) ? +rho : Infinity;
    const worse = (a, b) => gravity.indexOf(word("status", b)) - gravity.indexOf(word("status", a))
      || (size(data.rho[a]) < size(data.rho[b])) - (size(data.rho[a]) > size(data.rho[b]));
    const layers = place.dataset.layers.split(" "), tensor = place.dataset.tensor;
    let rows = [...data.rho.keys()].filter((index) =>
      layers.includes(word("check", index).split("/")[0]) && (!tensor || word("tensor", index) === tensor || !word("tensor", index))).sort(worse);
    const all = rows;
    const table = make("table");
    const heads = ["status", "check", "tensor", "dtype", "device", "rho", "bias", "grade", "again"]
      .filter((head) => head !== "device" || new Set(data.device).size > 1);
    const body = make("tbody"), more = make("button", "", { type: "button" }), count = make("span");
    const fill = (to) => {
      for (const index of rows.slice(body.rows.length, to)) {
        const row = body.insertRow();
        for (const head of heads) {
          const cell = row.insertCell(), text = head === "rho" || head === "bias" ? data[head][index] : word(head, index);
          if (head === "again") {
            cell.append(make("code", text, { className: "again", tabIndex: 0 }));
            if (word("said", index)) cell.append(make("br"), make("small", word("said", index)));
          } else cell.textContent = text;
          if (head === "status") cell.className = "state " + text.replaceAll(" ", "-");
        }
      }
      count.textContent = ` ${rows.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} judgements, the worst first`;
      more.hidden = body.rows.length >= rows.length;
      more.textContent = `${Math.min(SHOWN, rows.length - body.rows.length)} more`;
    };
    more.onclick = () => fill(body.rows.length + SHOWN);
    const search = make("input", "", { type: "search", placeholder: "bfloat16 causal failed" });
    const label = make("label", "only with the words ");
    label.append(search);
    search.oninput = () => {
      const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows = all.filter((index) => {
        const text = ["status", "check", "tensor", "dtype", "again"].map((column) => word(column, index)).join(" ").toLowerCase();
        return wanted.every((each) => text.includes(each));
      });
      body.replaceChildren();
      fill(SHOWN);
    };
    const head = make("thead").appendChild(make("tr"));
    head.append(...heads.map((text) => make("th", text, { scope: "col" })));
    table.append(head.parentElement, body);
    const box = make("div", "", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "All cases" });
    box.append(table);
    const filters = make("div", "", { className: "filters" });
    filters.append(label, count);
    place.replaceChildren(filters, box, more);
    fill(SHOWN);
  };
  for (const place of document.querySelectorAll(".cases")) {
    const fold = place.closest("details");
    fold.addEventListener("toggle", () => { if (fold.open && !place.dataset.shown) { place.dataset.shown = "yes"; show(place); } });
  }
  reveal();
})();
