/* rlplan ui: sends the form to the server, and replaces the last answer with the new one. */
"use strict";
(() => {
  const ui = document.querySelector(".ui"), form = ui.querySelector("form"), place = document.getElementById("answer");
  let asked = null, waiting = null;

  const fields = () => Object.fromEntries(new FormData(form));
  const fill = (values) => {
    for (const [name, value] of Object.entries(values)) {
      const field = form.elements[name];
      if (!field) continue;
      field.value = value;
      field.dispatchEvent(new Event("input"));
    }
    given();
  };
  /* The address holds the whole question, so that it can be kept and sent; a script stays on this page. */
  const keep = () => {
    const { ask: _, ...all } = fields();
    history.replaceState(null, "", "#" + new URLSearchParams(Object.entries(all).filter(([, value]) => value)));
  };
  const ask = async () => {
    if (asked) asked.abort();
    const mine = asked = new AbortController(), begin = performance.now();
    ui.dataset.state = "asking";
    try {
      const reply = await fetch("/", { method: "POST", body: JSON.stringify(fields()), signal: mine.signal,
        headers: { "Content-Type": "application/json", "X-Token": ui.dataset.token } });
      if (reply.status === 409) return ask();   // another page of this server asked meanwhile
      if (!reply.ok) throw new Error(await reply.text());
      const told = await reply.json();
      if (told.fields) fill({ ...told.fields, ask: "" });
      if (mine === asked) keep();
      const open = scrollY;
      place.innerHTML = told.html;   // made by our own templates, every value escaped; scripts in it are not run
      charts.open(place);
      scrollTo(0, open);
      for (const name of ["command", "job"]) document.getElementById(name).textContent = told[name];
      document.getElementById("took").textContent = `Answered in ${Math.round(performance.now() - begin)} ms.`;
    } catch (error) {
      if (error.name === "AbortError") return;
      const is_gone = error instanceof TypeError ? " Is rlplan ui still running?" : "";
      place.replaceChildren(charts.element("div", { class: "status bad" }, `No answer: ${error.message}.${is_gone}`));
    }
    if (mine === asked) ui.dataset.state = "answered";
  };
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(ask, 60); };

  for (const range of form.querySelectorAll("input[type=range]")) {   // a slider doubles every so often
    const number = form.elements[range.dataset.for], most = Math.log2(range.dataset.most);
    const follow = () => { range.value = (100 * Math.log2(Math.max(number.value, 1))) / most; };
    range.addEventListener("input", () => {
      const value = 2 ** ((range.value / 100) * most), step = value < 16 ? 1 : 2 ** Math.floor(Math.log2(value) - 3);
      number.value = Math.round(value / step) * step;
      soon();
    });
    number.addEventListener("input", follow);
    follow();
  }
  function given() {   // where answers are given, a job says how many
    const samples = form.elements.num_samples;
    const is_given = "given" in form.elements.algorithm.selectedOptions[0].dataset;
    for (const one of samples.parentElement.children) one.disabled = is_given;
  }
  for (const part of form.querySelectorAll("details")) part.open = !matchMedia("(max-width: 720px)").matches;
  const read = () => { if (location.hash.length > 1) fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1)))); };
  read();
  addEventListener("hashchange", () => { read(); ask(); });
  given();
  place.addEventListener("click", ({ target }) => {   // a fix replaces keys that were typed before
    if (!target.dataset.fix) return;
    const words = target.dataset.fix.match(/(?:[^\s']|'[^']*')+/g), more = form.elements.more;
    const keys = words.map((word) => word.split("=")[0]);
    const kept = (more.value.match(/(?:[^\s']|'[^']*')+/g) || []).filter((word) => !keys.includes(word.split("=")[0]));
    more.value = [...kept, ...words].join(" ");
    ask();
  });
  form.elements.algorithm.addEventListener("change", given);
  form.addEventListener("change", soon);
  form.addEventListener("input", (event) => { if (event.target.type === "number") soon(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  form.addEventListener("click", async ({ target }) => {
    const text = document.getElementById(target.dataset.copy || target.dataset.save || "")?.textContent;
    if (text == null) return;
    if (target.dataset.save) {
      const link = charts.element("a", { href: URL.createObjectURL(new Blob([text])), download: "job.yaml" });
      link.click();
      URL.revokeObjectURL(link.href);
      return;
    }
    await navigator.clipboard.writeText(text);
    target.textContent = "Copied";
    setTimeout(() => { target.textContent = "Copy"; }, 1200);
  });
  addEventListener("DOMContentLoaded", ask);
})();
