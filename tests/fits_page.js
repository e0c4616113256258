// Runs docs/fits.js on a page that is made of plain objects, and prints what it shows as JSON.
//   node fits_page.js DATA FITS QUESTIONS [front]   [[model, card, method, ram, own price or null], ...]
// With front, the page has no config and no command: no other element may be looked for.
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], listeners: {}, textContent: "" });
  }
  append(...parts) {
    for (const part of parts) {
      this.children.push(part);
      if (this.tag === "select" && (part.selected || this.value === undefined)) this.value = part.value;
    }
  }
  replaceChildren(...parts) {
    this.children = parts;
  }
  setAttribute() {}
  addEventListener(name, act) {
    this.listeners[name] = act;
  }
  querySelector() {
    if (front) throw new Error("the front page has no config");
    return new Element("code");
  }
  get parentElement() {
    return new Element("div");
  }
}

const [, , dataFile, scriptFile, questions, front] = process.argv;
const place = new Element("div");
const command = new Element("code");
const document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => (id === "fits" ? place : front ? null : command),
};
const context = vm.createContext({ document, window: {} });
vm.runInContext(fs.readFileSync(dataFile, "utf8"), context);
vm.runInContext(fs.readFileSync(scriptFile, "utf8"), context);

const [form, result] = place.children;
const [model, card, ram, method, tokens, price] = form.children.map((label) => label.children[0]);
const shown = JSON.parse(questions).map(([ofModel, ofCard, ofMethod, ofRam, ownPrice]) => {
  Object.assign(model, { value: ofModel });
  Object.assign(method, { value: ofMethod });
  Object.assign(ram, { value: String(ofRam) });
  Object.assign(card, { value: ofCard });
  form.listeners.input({ target: card });
  if (ownPrice !== null) {
    price.value = String(ownPrice);
    form.listeners.input({ target: price });
  }
  const [verdict, , figures] = result.children;
  const found = {};
  for (let i = 0; i < figures.children.length; i += 2) {
    found[figures.children[i].textContent] = figures.children[i + 1].textContent;
  }
  return { verdict: verdict.textContent, figures: found, command: command.textContent };
});
console.log(JSON.stringify(shown));
