// Begins here: makes the model, and draws the page at most once a frame.
import { render } from "./vendor/preact.js";
import { html } from "./html.js";
import { Model } from "./model.js";
import { apply, readTheme } from "./theme.js";
import { App } from "./views/app.js";

apply(readTheme());
const root = document.getElementById("app");
let drawing = false;

function titleOf({ status, lost }) {
  if (status?.phase === "ended") return "ended";
  return lost ? "reconnecting" : status?.phase ?? "edl";
}

function draw() {
  drawing = false;
  if (model.job) document.title = `${model.job} · ${titleOf(model)}`;
  render(html`<${App} model=${model} drawn=${{}} />`, root);
}

function changed() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(draw);
}

const model = new Model(new URL(".", location.href).href, changed);
root.replaceChildren();
model.start();
changed();
