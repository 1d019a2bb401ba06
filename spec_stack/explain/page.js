"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";
  const STATES = {
    k: ["kept", "rgb(var(--heat))"], d: ["dropped", "var(--dropped)"], p: ["protected", "var(--protected)"],
    r: ["recalled", "var(--recalled)"], c: ["cached from earlier turns", "var(--cached)"],
  };
  // Name, colour, and the line under it, for those who do not tell the colours apart.
  const WRITERS = {
    draft: ["accepted from the draft", "var(--draft)", "solid"],
    ngram: ["accepted from n-gram lookup", "var(--ngram)", "dotted"], bonus: ["bonus token", "var(--bonus)", "double"],
    correction: ["correction", "var(--correction)", "dashed"], plain: ["the target alone", "var(--plain)", "none"],
  };
  // A longer stretch of text that the target did not prefill now is folded.
  const FOLD = 96;

  // All text goes into text nodes; nothing of the data is ever parsed as markup.
  function add(parent, tag, options = {}, text = null) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }
  function draw(parent, tag, options = {}, text = null) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(options)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }
  const count = (value) => value.toLocaleString("en");
  const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
  function seconds(value) {
    if (value === null || value === undefined) return "unknown";
    if (value === 0) return "0";
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
  }
  const proposer = (step) => (step.proposer === "model" ? "draft" : step.proposer);
  const writer = (name) => WRITERS[name] || [`accepted from ${name}`, "var(--other)", "dotted"];

  // Numbers: on hover, and where there is no hover on a tap.
  function explain(element, text) {
    const show = (event) => {
      tip.textContent = typeof text === "function" ? text() : text;
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      const left = Math.min(event.clientX + 12, innerWidth - box.width - 8);
      const below = event.clientY + 18 + box.height < innerHeight;
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - box.height - 12)}px`;
    };
    element.addEventListener("pointermove", show);
    element.addEventListener("click", (event) => { show(event); event.stopPropagation(); });
    element.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  document.addEventListener("click", () => { tip.hidden = true; });
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);

  function legend(parent, entries) {
    const row = add(parent, "div", { class: "legend" });
    for (const [label, colour] of entries) {
      const entry = add(row, "span");
      add(entry, "i", { style: `background:${colour}` });
      entry.append(label);
    }
  }

  function tiles(parent, turn) {
    const m = turn.metrics;
    const rate = m.num_proposed ? m.num_accepted / m.num_proposed : null;
    const entries = [["prompt tokens", count(m.num_prompt_tokens)]];
    if (m.num_cached_tokens) entries.push(["of them new", count(m.num_new_tokens)]);
    entries.push([`kept: ${count(m.num_kept_tokens)} tokens`, share(m.keep_rate)]);
    if (m.num_recalled_tokens) entries.push(["recalled", count(m.num_recalled_tokens)]);
    entries.push(["time to first token", seconds(m.ttft_s)]);
    if (m.decode_tokens_per_s) entries.push(["tokens/s after it", m.decode_tokens_per_s.toFixed(0)]);
    entries.push(["tokens", count(m.num_tokens)], ["drafted tokens accepted", share(rate)]);
    entries.push(["tokens per step", (m.num_tokens / turn.steps.length).toFixed(2)]);
    const box = add(parent, "div", { class: "tiles" });
    for (const [label, value] of entries) {
      const tile = add(box, "div", { class: "tile" });
      add(tile, "b", {}, value);
      add(tile, "span", {}, label);
    }
    add(parent, "p", { class: "note" }, `Sparse prefill: ${m.sparse_prefill_reason}.`);
  }

  function firstToken(parent, turn, dense) {
    const first = turn.steps[0];
    add(parent, "h3", {}, "Time to first token");
    const total = turn.metrics.ttft_s;
    const rest = Math.max(0, total - first.draft_s - first.verify_s);
    const rows = [["this run", total, [
      ["the draft scores and looks ahead", first.draft_s, "var(--draft)"],
      ["the target prefills and verifies", first.verify_s, "var(--verify)"],
      ["the rest", rest, "var(--controller)"],
    ]]];
    if (dense !== null) rows.push(["dense, measured", dense, [["dense prefill, measured in the run beside", dense, "var(--verify)"]]]);
    const longest = Math.max(...rows.map((row) => row[1]));
    const bars = add(parent, "div", { class: "bars", "data-chart": "ttft" });
    for (const [name, whole, parts] of rows) {
      add(bars, "span", {}, name);
      const bar = add(bars, "div", { class: "bar" });
      for (const [label, value, colour] of parts) {
        const part = add(bar, "i", { style: `width:${(100 * value) / longest}%;background:${colour}` });
        explain(part, `${label}\n${seconds(value)}`);
      }
      add(bars, "span", {}, seconds(whole));
    }
    if (rows.length > 1) {
      const times = rows[1][1] / total;
      add(parent, "p", { class: "note" }, `${times >= 1 ? `${times.toFixed(1)}× sooner` : `${(1 / times).toFixed(1)}× later`} than ${rows[1][0]}.`);
    }
    legend(parent, rows[0][2].filter((part) => part[1] > 0.005 * longest).map((part) => [part[0], part[2]]));
  }

  // Heat by the root of the importance, over that of the highest hundredth: a few tokens have nearly all of it.
  function heats(importance) {
    if (!importance) return [null, null];
    const sorted = [...importance].sort((a, b) => a - b);
    const top = sorted[Math.floor(0.99 * (sorted.length - 1))] || 1;
    return [importance.map((value) => Math.min(1, Math.sqrt(Math.max(0, value) / top))), top];
  }

  function scoringQueries(parent, queries, total) {
    if (!queries.length) return;
    add(parent, "h3", {}, "Scoring queries");
    add(parent, "p", { class: "note" }, "What the prompt is scored by, with its weight from 0 to 1. The text below underlines it, the stronger the more it weighs.");
    const list = add(parent, "dl", { class: "queries" });
    for (const query of queries) {
      const row = add(list, "div");
      add(row, "dt", {}, query.weight.toFixed(2));
      const text = add(row, "dd");
      add(text, "span", { class: "q", style: `--weight:${query.weight}` }, query.text.trim() || "(white space)");
      if (query.start >= total) text.append(" (the look-ahead)");
    }
  }

  function promptText(parent, prompt) {
    add(parent, "h3", {}, "Prompt");
    const present = [...new Set(prompt.states)].filter((state) => STATES[state]);
    const numbers = {};
    for (const state of prompt.states) numbers[state] = (numbers[state] || 0) + 1;
    // In a prompt of which nothing was dropped, nothing stands out.
    const mixed = numbers.d ? " mixed" : "";
    const states = add(parent, "div", { class: `legend${mixed}` });
    for (const state of present) {
      const entry = add(states, "span");
      add(entry, "i", { style: `background:${STATES[state][1]}` });
      add(entry, "span", { class: `state ${state}` }, STATES[state][0]);
      entry.append(` (${count(numbers[state])})`);
    }
    const [heat, top] = heats(prompt.importance);
    if (heat) {
      const entry = add(add(parent, "div", { class: "legend" }), "span", {}, "importance to the draft: 0");
      add(entry, "i", { class: "scale" });
      entry.append(`${top.toPrecision(2)} and more${numbers.d ? "; paler where dropped" : ""}`);
    }
    const total = prompt.tokens.length, borders = prompt.borders || [total], segments = new Array(total).fill(-1);
    for (let segment = 0; segment + 1 < borders.length; segment += 1) segments.fill(segment, borders[segment], borders[segment + 1]);
    const unitOf = (index) => segments[index];
    const weights = new Array(total).fill(0);
    for (const query of [...prompt.queries].reverse()) weights.fill(query.weight, query.start, query.stop);
    const scoring = (index) => `scoring query, weight ${weights[index].toFixed(2)}`;
    const numbersOf = (index) => {
      const lines = [`token ${count(index)} of ${count(total)}: ${STATES[prompt.states[index]][0]}`];
      if (prompt.importance) lines.push(`importance ${prompt.importance[index].toPrecision(3)}`);
      if (weights[index]) lines.push(scoring(index));
      const segment = unitOf(index);
      if (prompt.votes && segment >= 0) lines.push(`segment ${segment}: score ${prompt.votes[segment].toPrecision(3)}`);
      return lines.join("\n");
    };
    // The map: one column per segment (line or chunk), coloured by what became of it; its height is its heat.
    const map = draw(parent, "svg", {
      class: "map", viewBox: `0 0 ${total} 26`, preserveAspectRatio: "none", role: "img",
      "aria-label": `map of the prompt: ${present.map((state) => `${numbers[state]} ${STATES[state][0]}`).join(", ")}`,
    });
    draw(map, "rect", { width: total, height: 26, fill: "var(--line)" });
    for (let from = 0; from < total;) {
      let to = from + 1;
      while (to < total && (!heat || unitOf(to) === unitOf(from)) && prompt.states[to] === prompt.states[from]) to += 1;
      const state = prompt.states[from];
      let best = 1;
      if (heat) { best = 0; for (let i = from; i < to; i += 1) best = Math.max(best, heat[i]); }
      const height = state === "d" ? 4 + 12 * best : 10 + 16 * best;
      const bar = draw(map, "rect", {
        x: from, width: to - from, y: 26 - height, height, fill: STATES[state][1], opacity: state === "d" ? 0.55 : 1,
      });
      const [first, last, segment] = [from, to - 1, unitOf(from)];
      explain(bar, () => {
        const lines = [`tokens ${count(first)} to ${count(last)}: ${STATES[state][0]}`];
        if (prompt.importance) lines.push(`highest importance ${Math.max(...prompt.importance.slice(first, last + 1)).toPrecision(3)}`);
        if (prompt.votes && segment >= 0) lines.push(`segment ${segment}: score ${prompt.votes[segment].toPrecision(3)}`);
        return lines.join("\n");
      });
      from = to;
    }
    if (heat) add(parent, "p", { class: "note" }, "The whole prompt from left to right, a bar per line or chunk: the taller, the more important its best token.");
    scoringQueries(parent, prompt.queries, total);
    const text = add(parent, "div", { class: `text prompt${mixed}` });
    const fill = (box, from, to) => {
      for (let index = from; index < to; index += 1) {
        const token = add(box, "span", { class: prompt.states[index] }, prompt.tokens[index]);
        if (heat) {
          const most = prompt.states[index] === "d" ? "var(--hot-dropped)" : "var(--hot)";
          if (heat[index] > 0.03) token.style.background = `rgba(var(--heat), calc(${most} * ${heat[index].toFixed(2)}))`;
        }
        if (weights[index]) {
          token.classList.add("q");
          token.style.setProperty("--weight", weights[index]);
          token.title = scoring(index);
        }
        explain(token, () => numbersOf(index));
      }
    };
    const folds = (state) => state === "d" || state === "c";
    for (let from = 0; from < total;) {
      const state = prompt.states[from];
      let to = from + 1;
      while (to < total && (folds(state) ? prompt.states[to] === state : !folds(prompt.states[to]))) to += 1;
      if (folds(state) && to - from > FOLD) {
        const fold = add(text, "details");
        add(fold, "summary", {}, `… ${count(to - from)} tokens ${state === "d" ? "dropped" : "cached"} …`);
        const [first, last] = [from, to];
        fold.addEventListener("toggle", () => { if (fold.open && fold.childNodes.length === 1) fill(fold, first, last); });
      } else fill(text, from, to);
      from = to;
    }
    const why = heat ? "The stronger a token's colour, the more the draft attends to it; the scale is the importance's root. " : "";
    add(parent, "p", { class: "note" }, `${why}Hover or tap for numbers; folded stretches open.`);
  }

  function answerText(parent, turn) {
    add(parent, "h3", {}, "Answer, by who wrote each token");
    const numbers = {};
    for (const token of turn.answer) numbers[token.writer] = (numbers[token.writer] || 0) + 1;
    const names = add(parent, "div", { class: "legend" });
    for (const name of Object.keys(numbers)) {
      const [label, colour, line] = writer(name);
      const entry = add(names, "span");
      add(entry, "b", { style: `--writer:${colour}`, "data-line": line }, label);
      entry.append(` (${count(numbers[name])})`);
    }
    const meanings = [];
    if (numbers.bonus) meanings.push("A bonus token is the target's own, after a proposal that it accepted whole.");
    if (numbers.correction) meanings.push("A correction is the target's own, in the place of the first token that it rejected.");
    if (meanings.length) add(parent, "p", { class: "note" }, meanings.join(" "));
    const text = add(parent, "div", { class: "text answer" });
    for (const token of turn.answer) {
      const step = turn.steps[token.step];
      const [label, colour, line] = writer(token.writer);
      const part = add(text, "b", { style: `--writer:${colour}`, "data-line": line, "data-writer": token.writer }, token.text || "▪");
      explain(part, `${label}\nstep ${token.step}: ${step.num_accepted} of ${step.gamma} accepted`);
    }
  }

  // Charts over the steps, all with one x axis. marks(svg, x, width, step) draws one step.
  function chart(parent, turn, title, note, steps, highest, format, marks, numbers, name) {
    add(parent, "h3", {}, title);
    if (note) add(parent, "p", { class: "note" }, note);
    const column = Math.max(7, Math.min(40, Math.floor(640 / Math.max(1, steps.length))));
    const left = 54, height = 96, width = Math.max(180, left + column * steps.length + 6);
    const scroll = add(parent, "div", { class: "scroll" });
    const svg = draw(scroll, "svg", { width, height: height + 18, role: "img", "aria-label": title, "data-chart": name });
    for (const part of [0, 0.5, 1]) {
      const y = 6 + (height - 12) * (1 - part);
      draw(svg, "line", { class: "grid", x1: left, x2: width, y1: y, y2: y });
      draw(svg, "text", { x: left - 4, y: y + 3.5, "text-anchor": "end" }, format(part * highest));
    }
    draw(svg, "text", { x: left - 4, y: height + 12, "text-anchor": "end" }, "step");
    const y = (value) => 6 + (height - 12) * (1 - Math.min(1, value / highest));
    steps.forEach(([index, step], place) => {
      const x = left + column * place;
      marks(svg, x + 1, column - 2, step, y);
      const every = Math.ceil(24 / column);
      if (place % every === 0) draw(svg, "text", { x: x + column / 2, y: height + 12, "text-anchor": "middle" }, String(index));
      explain(draw(svg, "rect", { class: "hit", x, y: 0, width: column, height }), () => `step ${index}\n${numbers(step)}`);
    });
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const listed = (values, digits) => values.map((value) => value.toFixed(digits)).join("  ");

  function charts(parent, turn) {
    const all = turn.steps.map((step, index) => [index, step]);
    const timed = all.filter(([, step]) => !step.is_prefill);
    if (timed.length) {
      const parts = [["draft_s", "draft", "var(--draft)"], ["verify_s", "verify", "var(--verify)"], ["policy_s", "controller", "var(--controller)"]];
      const highest = Math.max(...timed.map(([, step]) => step.draft_s + step.verify_s + step.policy_s));
      chart(parent, turn, "Time by step", "Step 0, which prefills, is above.", timed, highest, seconds, (svg, x, width, step, y) => {
        let below = 0;
        for (const [key, , colour] of parts) {
          draw(svg, "rect", { x, width, y: y(below + step[key]), height: Math.max(0, y(below) - y(below + step[key])), fill: colour });
          below += step[key];
        }
      }, (step) => parts.map(([key, label]) => `${label} ${seconds(step[key])}`).join("\n"), "time");
      legend(parent, parts.map(([, label, colour]) => [label, colour]));
    }
    // Even, so that the middle of the axis is a whole number.
    const most = 2 * Math.ceil(Math.max(1, ...turn.steps.map((step) => step.gamma)) / 2);
    chart(parent, turn, "Gamma by step, tokens", "Outlined: proposed. Filled: accepted.", all, most, (value) => String(value), (svg, x, width, step, y) => {
      const colour = writer(proposer(step))[1];
      if (!step.gamma) draw(svg, "rect", { x, width, y: y(0) - 2, height: 2, fill: "var(--plain)" });
      draw(svg, "rect", { x: x + 0.5, width: width - 1, y: y(step.gamma), height: y(0) - y(step.gamma), fill: "none", stroke: colour });
      draw(svg, "rect", { x: x + 0.5, width: width - 1, y: y(step.num_accepted), height: y(0) - y(step.num_accepted), fill: colour });
    }, (step) => `gamma ${step.gamma}, ${step.num_accepted} accepted${step.gamma ? `, proposed by ${proposer(step)}` : ""}`, "gamma");
    const dots = (key, right, wrong) => (svg, x, width, step, y) => {
      step.signals[key].forEach((value, index) => {
        const accepted = index < step.num_accepted;
        const place = x + (width * (index + 0.5)) / step.signals[key].length;
        draw(svg, "circle", { cx: place, cy: y(value), r: Math.max(1.5, Math.min(2.6, width / 6)), fill: accepted ? right : "none", stroke: accepted ? right : wrong });
      });
      if (step.signals[key].length) draw(svg, "line", { x1: x, x2: x + width, y1: y(mean(step.signals[key])), y2: y(mean(step.signals[key])), stroke: "var(--soft)", "stroke-width": 0.8 });
    };
    const note = "One dot per drafted token, filled where it was accepted; the line is a step's mean.";
    if (turn.steps.some((step) => step.signals.confidence.length)) {
      chart(parent, turn, "Confidence by step, probability", note, all, 1, (value) => value.toFixed(1), dots("confidence", "var(--draft)", "var(--correction)"),
        (step) => `confidence ${listed(step.signals.confidence, 2)}`, "confidence");
      const highest = Math.max(1, ...turn.steps.flatMap((step) => step.signals.entropy));
      chart(parent, turn, "Entropy by step, bits", note, all, highest, (value) => value.toFixed(1), dots("entropy", "var(--draft)", "var(--correction)"),
        (step) => `entropy ${listed(step.signals.entropy, 2)}`, "entropy");
    }
    const box = add(parent, "details", { class: "numbers" });
    add(box, "summary", {}, "Numbers by step");
    box.addEventListener("toggle", () => {
      if (!box.open || box.childNodes.length > 1) return;
      const table = add(add(box, "div", { class: "scroll" }), "table");
      const head = add(table, "tr");
      for (const name of ["step", "proposer", "gamma", "accepted", "tokens", "draft", "verify", "controller", "confidence", "entropy"]) add(head, "th", {}, name);
      turn.steps.forEach((step, index) => {
        const row = add(table, "tr");
        const cells = [index, step.gamma ? proposer(step) : "–", step.gamma, step.num_accepted, step.num_tokens, seconds(step.draft_s), seconds(step.verify_s),
          seconds(step.policy_s), step.signals.confidence.length ? mean(step.signals.confidence).toFixed(2) : "–", step.signals.entropy.length ? mean(step.signals.entropy).toFixed(2) : "–"];
        for (const cell of cells) add(row, "td", {}, String(cell));
      });
    });
  }

  function show(panel, turn, dense) {
    panel.replaceChildren();
    add(panel, "p", { class: "question" }, turn.question);
    tiles(panel, turn);
    firstToken(panel, turn, dense);
    promptText(panel, turn.prompt);
    answerText(panel, turn);
    charts(panel, turn);
  }

  document.getElementById("title").textContent = data.title;
  const about = document.getElementById("about");
  for (const [name, value] of Object.entries(data.about)) {
    const entry = add(about, "div");
    add(entry, "dt", {}, name);
    add(entry, "dd", {}, value);
  }
  const runs = document.getElementById("runs");
  runs.replaceChildren();
  if (data.runs.length === 2) runs.className = "side";
  // In a comparison the run that pruned nothing is what the other one is measured against, turn by turn.
  const denseRun = data.runs.find((run) => run.turns.every((turn) => turn.metrics.sparse_prefill === false));
  for (const run of data.runs) {
    const section = add(runs, "section", { class: "run" });
    add(section, "h2", {}, run.name);
    const tabs = run.turns.length > 1 ? add(section, "div", { class: "tabs", role: "tablist" }) : null;
    const panel = add(section, "div", { class: "panel" });
    const open = (index) => {
      const beside = denseRun && denseRun !== run ? denseRun.turns[index] : null;
      show(panel, run.turns[index], beside ? beside.metrics.ttft_s : null);
      if (tabs) [...tabs.children].forEach((tab, place) => tab.setAttribute("aria-selected", String(place === index)));
    };
    if (tabs) run.turns.forEach((turn, index) => {
      add(tabs, "button", { type: "button", role: "tab" }, `turn ${index + 1}`).addEventListener("click", () => open(index));
    });
    open(0);
  }
})();
