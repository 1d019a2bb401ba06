"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // What kept a text: a sign, a colour, and what it means.
  const REASONS = {
    attention: ["●", "attention", "the draft attends to it from the question"],
    "rare word": ["◆", "word", "attention, and rare words in common with the question"],
    head: ["#", "head", "under a heading, key or scope that the question names"],
    words: ["◆", "word", "words in common with the question (BM25)"],
    score: ["●", "attention", "the selection rule's score"],
    ends: ["▸", "ends", "the first and last tokens are always kept"],
    protected: ["■", "protected", "chat template, system message, protected text"],
    recalled: ["↺", "recalled", "dropped earlier, and needed now"],
    cached: ["≡", "cached", "in the cache from earlier turns"],
    dense: ["▪", "ends", "nothing of it was pruned"],
  };
  // Who wrote a token of the answer: a name, a colour, and the line under it.
  const WRITERS = {
    draft: ["accepted from the draft", "draft", "solid"], ngram: ["accepted from n-gram lookup", "ngram", "dotted"],
    bonus: ["bonus token", "bonus", "double"], correction: ["correction", "correction", "dashed"], plain: ["the target alone", "plain", "none"],
  };
  const SVG = "http://www.w3.org/2000/svg";
  let turn = null, kept = [], now = -1;

  // All text goes into text nodes; nothing of the data is ever parsed as markup.
  function add(parent, tag, options = {}, text = null, space = null) {
    const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(options)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }
  const colour = (name) => `--why:var(--${name})`;
  const count = (value) => value.toLocaleString("en");
  const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);
  function seconds(value) {
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
  }
  const writer = (name) => WRITERS[name] || [`accepted from ${name}`, "other", "dotted"];
  const proposer = (step) => (step.proposer === "model" ? "draft" : step.proposer);
  const mean = (values) => (values.length ? (values.reduce((sum, value) => sum + value, 0) / values.length).toFixed(2) : "–");

  function answer(parent) {
    const m = turn.metrics, section = add(parent, "section", { class: "answers" });
    add(section, "h1", {}, turn.question);
    const text = add(section, "p", { class: "answer", "aria-label": "answer" }), numbers = {};
    for (const token of turn.answer) {
      const [label, name, line] = writer(token.writer), step = turn.steps[token.step];
      numbers[token.writer] = (numbers[token.writer] || 0) + 1;
      const title = `${label}, step ${token.step}: ${step.num_accepted} of ${step.gamma} accepted`;
      add(text, "b", { style: colour(name), "data-line": line, "data-writer": token.writer, title }, token.text || "▪");
    }
    if (turn.dense) {
      const same = turn.dense.text === turn.text, times = turn.dense.ttft_s / m.ttft_s;
      add(section, "p", { class: "note dense" }, `From the whole prompt, first token ${times >= 1 ? `${times.toFixed(1)}× later` : `${(1 / times).toFixed(1)}× sooner`}` +
        ` (${seconds(turn.dense.ttft_s)}): ${same ? "the same answer." : turn.dense.text}`);
    }
    const legend = add(section, "div", { class: "legend" });
    for (const [key, number] of Object.entries(numbers)) {
      const [label, name, line] = writer(key);
      add(legend, "b", { style: colour(name), "data-line": line }, `${label} (${count(number)})`);
    }
    const tiles = add(section, "div", { class: "tiles" });
    const entries = [["prompt tokens", count(m.num_prompt_tokens)], [`kept: ${count(m.num_kept_tokens)} tokens`, share(m.keep_rate)], ["time to first token", seconds(m.ttft_s)]];
    if (m.num_cached_tokens) entries.push(["new tokens", count(m.num_new_tokens)]);
    if (m.decode_tokens_per_s) entries.push(["tokens/s after it", m.decode_tokens_per_s.toFixed(0)]);
    entries.push(["drafted tokens accepted", share(m.acceptance_rate)], ["tokens per step", m.tokens_per_step.toFixed(2)]);
    for (const [label, value] of entries) {
      const tile = add(tiles, "div");
      add(tile, "b", {}, value);
      tile.append(label);
    }
    add(section, "p", { class: "note" }, `Sparse prefill: ${m.sparse_prefill_reason}.`);
  }

  // Go to another kept row: the next one in a direction, of a reason if one is given, or the nearest to a row.
  function go(direction, reason = null) {
    for (let tries = 0, at = now < 0 && direction < 0 ? 0 : now; tries < kept.length; tries += 1) {
      at = (at + direction + kept.length) % kept.length;
      if (!reason || kept[at].reasons.includes(reason)) return show(at);
    }
  }
  function show(at) {
    if (now >= 0 && kept[now]) kept[now].element.classList.remove("now");
    now = at;
    const { element, reasons } = kept[at];
    element.classList.add("now");
    element.scrollIntoView({ block: "center" });
    document.getElementById("where").textContent = `kept line ${at + 1} of ${kept.length}: ${reasons.join(", ")}`;
  }

  function row(parent, line) {
    // White space alone marks no line: a line's indentation belongs to the segment before it.
    const reasons = [...new Set(line.parts.filter((part) => part[0].trim()).map((part) => part[1]).filter(Boolean))];
    const element = add(parent, "div", { class: reasons.length ? "row kept" : "row" });
    const why = add(element, "span", { class: "why" });
    if (reasons.length) element.style.setProperty("--why", `var(--${REASONS[reasons[0]][1]})`);
    for (const reason of reasons) {
      const [sign, name, title] = REASONS[reason], mark = add(why, "div", { style: colour(name), title }, `${sign} `);
      add(mark, "span", {}, reason);
    }
    add(add(element, "span", { class: "heat", title: `importance ${line.heat} of 1` }), "i", { style: `width:${100 * line.heat}%` });
    const text = add(element, "span", { class: "line" });
    for (const [part, reason, weight] of line.parts) {
      const piece = add(text, reason ? "mark" : "span", reason ? { style: colour(REASONS[reason][1]) } : {}, part);
      if (weight) {
        piece.classList.add("query");
        piece.style.setProperty("--weight", weight);
        piece.title = `scoring query, weight ${weight}`;
      }
    }
    if (reasons.length) kept.push({ element, reasons });
  }

  function prompt(parent) {
    const section = add(parent, "section", { class: "prompt" });
    add(section, "h2", {}, "What was kept of the prompt, and why");
    const legend = add(section, "div", { class: "legend" });
    for (const [reason, number] of Object.entries(turn.tokens)) {
      const [sign, name, title] = REASONS[reason], button = add(legend, "button", { type: "button", title, "data-reason": reason });
      add(button, "span", { class: "sign", style: colour(name) }, `${sign} ${reason}`);
      button.append(` ${count(number)}`);
      button.addEventListener("click", () => go(1, reason));
    }
    add(section, "p", { class: "note" }, "Kept text stands on a tint, with a sign for what kept it; numbers are tokens, and lead to it. Dropped text is pale and folded. " +
      "Bars show importance, the draft's attention to a line (square-root scale). A wavy line marks the queries that scored the prompt.");
    const jump = add(section, "div", { class: "jump" }), bar = add(jump, "div");
    for (const [label, step] of [["◀ previous (p)", -1], ["next kept line (n) ▶", 1]]) add(bar, "button", { type: "button" }, label).addEventListener("click", () => go(step));
    add(bar, "span", { id: "where", "aria-live": "polite" }, "");
    const total = turn.rows.reduce((sum, line) => sum + line.tokens, 0);
    const map = add(jump, "svg", { class: "map", viewBox: `0 0 ${total} 24`, preserveAspectRatio: "none", role: "img", "aria-label": "map of the prompt: kept lines reach the top" }, null, SVG);
    const text = add(section, "div", { class: "text" });
    let fold = null, folded = [0, 0], x = 0;
    const close = () => { if (fold) fold.firstChild.textContent = `${count(folded[0])} ${folded[0] > 1 ? "lines" : "line"} dropped, ${count(folded[1])} tokens`; fold = null; folded = [0, 0]; };
    for (const line of turn.rows) {
      const full = line.parts.filter((part) => part[0].trim()), isKept = full.some((part) => part[1]);
      if (isKept) close();
      else if (!fold && full.length) { fold = add(text, "details"); add(fold, "summary"); }
      row(fold || text, line);
      const at = kept.length - 1, name = isKept ? REASONS[kept[at].reasons[0]][1] : "heat", height = isKept ? 24 : 12 * line.heat;
      add(map, "rect", { x, width: line.tokens, y: 24 - height, height, fill: `var(--${name})` }, null, SVG).addEventListener("click", () => show(Math.max(0, at)));
      if (fold) folded = [folded[0] + (full.length ? 1 : 0), folded[1] + line.tokens];
      x += line.tokens;
    }
    close();
    if (!turn.queries.length) return;
    const queries = add(section, "details", { class: "queries" });
    add(queries, "summary", {}, `Scored by ${count(turn.queries.length)} queries`);
    for (const query of turn.queries) add(queries, "div", {}, `${query.weight.toFixed(2)}  ${query.text.trim() || "(white space)"}`);
  }

  function times(parent) {
    const section = add(parent, "section", { class: "times" }), first = turn.steps[0], total = turn.metrics.ttft_s;
    add(section, "h2", {}, "Time");
    const parts = [["the draft scores the prompt", first.draft_s, "draft"], ["the target prefills", first.verify_s, "bonus"],
      ["the rest", Math.max(0, total - first.draft_s - first.verify_s), "plain"]].filter((part) => part[1] > 0.005 * total);
    const bar = add(section, "div", { class: "bar" }), legend = add(section, "div", { class: "legend" });
    for (const [label, value, name] of parts) {
      add(bar, "i", { style: `width:${(100 * value) / total}%;${colour(name)}` });
      add(legend, "b", { style: colour(name), "data-line": "solid" }, `${label}: ${seconds(value)}`);
    }
    const box = add(section, "details"), table = (add(box, "summary", {}, `${count(turn.steps.length)} steps`), add(add(box, "div", { class: "scroll" }), "table"));
    const head = add(table, "tr");
    for (const name of ["step", "proposer", "gamma", "accepted", "tokens", "draft", "verify", "policy", "confidence", "entropy"]) add(head, "th", {}, name);
    turn.steps.forEach((step, index) => {
      const line = add(table, "tr");
      for (const cell of [index, step.gamma ? proposer(step) : "–", step.gamma, step.num_accepted, step.num_tokens, seconds(step.draft_s), seconds(step.verify_s),
        seconds(step.policy_s), mean(step.signals.confidence), mean(step.signals.entropy)]) add(line, "td", {}, String(cell));
    });
  }

  function open(index) {
    turn = data.turns[index], kept = [], now = -1;
    const main = document.getElementById("turn");
    main.replaceChildren();
    for (const part of [answer, prompt, times]) part(main);
    [...document.getElementById("tabs").children].forEach((tab, place) => tab.setAttribute("aria-selected", String(place === index)));
  }
  if (data.turns.length > 1) data.turns.forEach((each, index) => {
    const tab = add(document.getElementById("tabs"), "button", { type: "button", role: "tab" }, `turn ${index + 1}`);
    tab.addEventListener("click", () => open(index));
  });
  for (const [name, value] of Object.entries(data.about)) {
    const entry = add(document.getElementById("about"), "div");
    add(entry, "dt", {}, name);
    add(entry, "dd", {}, value);
  }
  document.addEventListener("keydown", (event) => {
    const direction = { n: 1, p: -1 }[event.key];
    if (direction && !event.ctrlKey && !event.metaKey && !event.altKey) go(direction);
  });
  open(0);
})();
