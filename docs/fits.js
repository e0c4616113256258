// The form of fits.md and index.md: picks an answer of fits_data.js and shows it. No server, no library.
(() => {
  const data = window.fits;
  const place = document.getElementById("fits");
  // The front page has the form and its answer, without a config and a command below.
  const nowhere = document.createElement("code");
  const command = document.getElementById("fits-command") || nowhere;
  const config =
    command === nowhere ? nowhere : place.parentElement.querySelector(".highlight code");
  const short = (name) => name.split("/").pop();
  const cardName = (name) => (name === "none" ? "no card: the CPU alone" : name);
  const billions = (params) => `${Number((params / 1e9).toPrecision(3))}B`;

  const make = (tag, text = "", attributes = {}) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.textContent = text;
    return element;
  };
  const labelled = (name, control) => {
    const label = make("label", name);
    label.append(control);
    return label;
  };
  const choice = (names, shown, chosen) => {
    const select = make("select");
    for (const name of names) {
      select.append(make("option", shown(name), { value: name, selected: name === chosen }));
    }
    return select;
  };
  const number = (value, step) =>
    make("input", "", { type: "number", min: "0", step, value, inputMode: "decimal" });

  const [model0, card0, method0, ram0] = data.default;
  const model = choice(
    Object.keys(data.models),
    (name) => `${short(name)} (${billions(data.models[name])})`,
    model0,
  );
  const card = choice(Object.keys(data.cards), cardName, card0);
  const ram = choice(Object.keys(data.ram), (size) => `${size} GB`, String(ram0));
  const method = choice(Object.keys(data.methods), (name) => name, method0);
  const tokens = number(data.tokens / 1e6, "any");
  const price = number("", "any");
  let ownPrice = false; // the reader has entered one
  const form = make("form", "", { className: "fits-form" });
  form.append(
    labelled("Model", model),
    labelled("Card", card),
    labelled("Host memory", ram),
    labelled("Method", method),
    labelled("Million tokens", tokens),
    labelled("$ an hour", price),
  );
  const verdict = make("p", "", { className: "fits-verdict" });
  const ways = make("ul");
  const figures = make("dl", "", { className: "fits-figures" });
  const result = make("div");
  result.setAttribute("aria-live", "polite");
  result.append(verdict, ways, figures);
  place.replaceChildren(form, result);

  // The answer: a row by its columns, or null; and the least memory that fits, or what is too small.
  function answer(ofModel, ofCard, ofMethod, ofRam) {
    const rows = data.answers[ofModel][ofCard][ofMethod];
    if (typeof rows === "string") return { row: null, least: rows };
    const fitting = rows.filter((row) => row[0] <= ofRam);
    if (!fitting.length) return { row: null, least: rows[0][0] };
    const last = fitting[fitting.length - 1];
    return { row: Object.fromEntries(data.columns.map((name, index) => [name, last[index]])) };
  }

  // Predictions are ranges, each end rounded outward to two digits: prediction.py in megatrain/planning.
  function rounded(value, direction, least) {
    if (value <= 0) return 0;
    const quantum = Math.max(10 ** (Math.floor(Math.log10(value)) - 1), least);
    const steps = value / quantum;
    const whole = Math.round(steps);
    return quantum * (Math.abs(steps - whole) < 1e-9 * steps ? whole : direction(steps));
  }
  const range = ([low, high], write, least = 0) =>
    `${write(rounded(low, Math.floor, least))} to ${write(rounded(high, Math.ceil, least))}`;
  function twoDigits(value) {
    if (value > 0 && value < 0.995) return String(Number(value.toPrecision(2)));
    if (value > 0 && value < 9.95) return value.toFixed(1);
    return Math.round(value).toLocaleString("en");
  }
  const timeRange = (value) => [value * (1 - data.time_error), value * (1 + data.time_error)];
  function predictedTime(seconds) {
    const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]];
    const ends = timeRange(seconds);
    const [unit, name] = units.find(([size]) => ends[0] >= size) || units[4];
    return `${range(ends.map((end) => end / unit), twoDigits)} ${name}`;
  }
  function predictedPrice(dollars) {
    const write = (value) =>
      value < 9.995 ? `$${value.toFixed(2)}` : `$${Math.round(value).toLocaleString("en")}`;
    return range(timeRange(dollars), write, 0.01);
  }
  function predictedSpeed(perSecond) {
    const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]];
    const write = (value) => {
      const [unit, letter] = units.find(([size]) => value >= 0.999 * size) || units[4];
      return `${twoDigits(value / unit)}${letter}`;
    };
    const ends = [perSecond / (1 + data.time_error), perSecond / (1 - data.time_error)];
    return `${range(ends, write)} tok/s`;
  }

  const digits = (value) =>
    value < 1000 ? String(Number(value.toPrecision(3))) : Math.round(value).toLocaleString("en");
  function size(gib, limit) {
    const [unit, scale] = gib < 1 ? ["MiB", 1024] : ["GiB", 1];
    const of = limit ? ` of ${digits(limit * scale)}` : "";
    return `${digits(gib * scale)}${of} ${unit}`;
  }
  const speed = (row) => predictedSpeed(row.tokens_per_s);

  // What fits instead, as text and the control that a click changes.
  function alternatives(least) {
    const found = [];
    const here = (m, c, d, r) => answer(m, c, d, Number(r)).row;
    if (typeof least === "number") {
      const row = here(model.value, card.value, method.value, least);
      found.push([`${least} GB of host memory: ${speed(row)}`, ram, String(least)]);
    }
    if (method.value === "all weights") {
      const row = here(model.value, card.value, "adapters", ram.value);
      if (row) found.push([`adapters: ${speed(row)}`, method, "adapters"]);
    }
    const smaller = Object.keys(data.models)
      .filter((name) => data.models[name] < data.models[model.value])
      .filter((name) => here(name, card.value, method.value, ram.value))
      .sort((one, other) => data.models[other] - data.models[one])[0];
    if (smaller) {
      const row = here(smaller, card.value, method.value, ram.value);
      found.push([`a smaller model, ${short(smaller)}: ${speed(row)}`, model, smaller]);
    }
    const larger = Object.keys(data.cards).find(
      (name) =>
        data.cards[name].memory > data.cards[card.value].memory &&
        here(model.value, name, method.value, ram.value),
    );
    if (larger) {
      const row = here(model.value, larger, method.value, ram.value);
      found.push([`a larger card, ${larger}: ${speed(row)}`, card, larger]);
    }
    return found;
  }

  function show() {
    const { row, least } = answer(model.value, card.value, method.value, Number(ram.value));
    const most = Object.keys(data.ram).pop();
    ways.replaceChildren();
    figures.replaceChildren();
    result.className = row ? "fits-yes" : "fits-no";
    config.textContent = data.methods[method.value]
      .replaceAll("{model}", model.value)
      .replaceAll("{name}", short(model.value).toLowerCase()) +
      (row && row.states !== "fp32" ? `optim: {state: ${row.states}}\n` : "");
    const gpu = card.value.includes(" ") ? `"${card.value}"` : card.value;
    const many = Math.max(0, Number(tokens.value));
    const typical = data.cards[card.value];
    // The typical price is of a host with so much memory: a plan that needs more has none.
    const isPriced = row && typical.price && row.host <= typical.price_host;
    if (!ownPrice) price.value = isPriced ? typical.price : "";
    const hourly = Math.max(0, Number(price.value));
    command.textContent =
      `megatrain estimate run.yaml --gpu ${gpu} --ram ${ram.value}GB` +
      (many ? ` --tokens ${many}M` : "") +
      (hourly ? ` --price ${hourly}` : "");
    if (!row) {
      const why = {
        card: "The card's memory is too small for it, whatever the host has.",
        RAM: `It needs more than ${most} GB of host memory.`,
      };
      verdict.textContent = `Does not fit. ${why[least] || `It needs ${least} GB of host memory.`}`;
      for (const [text, control, value] of alternatives(least)) {
        const button = make("button", text, { type: "button" });
        button.addEventListener("click", () => {
          control.value = value;
          changed({ target: control });
        });
        const item = make("li");
        item.append(button);
        ways.append(item);
      }
      return;
    }
    const seconds = (many * 1e6) / row.tokens_per_s;
    verdict.textContent = `Fits: ${speed(row)}, predicted`;
    const cost = (seconds / 3600) * hourly;
    const noPrice = typical.price
      ? "none: hosts with a typical price have less memory; enter one" : "enter one of an hour";
    const lines = {
      [`${many.toLocaleString("en")}M tokens take`]: predictedTime(seconds),
      Price: hourly
        ? `${predictedPrice(cost)} at $${hourly} an hour${ownPrice ? "" : " (typical)"}`
        : noPrice,
      "Host memory": size(row.host, data.ram[ram.value]),
      "Card's memory": row.device ? size(row.device, typical.memory) : "",
      "Disk, one checkpoint kept": size(row.disk),
      "Optimizer states": row.states + (row.backwards > 1 ? ", backward runs twice" : ""),
      "A step": `${row.step_tokens.toLocaleString("en")} tokens`,
    };
    for (const [name, text] of Object.entries(lines)) {
      if (text) figures.append(make("dt", name), make("dd", text));
    }
  }

  function changed(event) {
    if (event.target === price) ownPrice = price.value !== "";
    if (event.target === card) ownPrice = false;
    show();
  }

  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  changed({ target: card });
})();
