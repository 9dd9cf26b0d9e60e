"use strict";
(() => {
  const root = document.documentElement, at = id => document.getElementById(id);

  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const label = () => {
    at("theme").textContent = dark() ? "Light" : "Dark";
    at("theme").setAttribute("aria-label", "Switch to the " + (dark() ? "light" : "dark") + " theme");
  };
  at("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  system.addEventListener("change", label);
  label();

  // Numbers by their value, words by the alphabet; what is missing comes last in both directions.
  const key = (row, column) => {
    const cell = row.cells[column], value = cell.dataset.value;
    if (value !== undefined) return value === "" ? null : Number(value);
    return cell.textContent.trim().toLowerCase() || null;
  };
  const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = head.closest("table").tBodies[0];
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const keyed = Array.from(body.rows, row => [key(row, head.cellIndex), row]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b));
      body.append(...keyed.map(([, row]) => row));
    });
  }

  for (const input of document.querySelectorAll("input[data-filter]")) {
    const rows = Array.from(at(input.dataset.filter).tBodies[0].rows), count = input.closest(".tools").querySelector("output");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = words.length ? shown + " of " + rows.length : "";
    });
  }

  const reasons = at("reasons"), details = Array.from(document.querySelectorAll(".matrix details"));
  if (reasons) reasons.addEventListener("click", () => {
    const open = details.some(one => !one.open);
    for (const one of details) one.open = open;
    reasons.textContent = open ? "Hide all reasons" : "Show all reasons";
  });
  if (matchMedia("(min-width: 60rem)").matches) for (const one of details) one.open = one.querySelector(".none") !== null;
  addEventListener("beforeprint", () => { for (const one of details) one.open = true; });

  const text = () => JSON.stringify(JSON.parse(at("result").textContent), null, 1);
  at("download").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text()], { type: "application/json" }));
    link.download = at("download").dataset.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  at("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      at("copied").textContent = "Copied.";
    } catch {
      at("copied").textContent = "The browser does not let this page copy: download it instead.";
    }
  });
})();
