// What the slots spend their time on.
import { duration, percent } from "../format.js";
import { html } from "../html.js";
import { goodput } from "../status.js";
import { Panel } from "./panel.js";

const MEANINGS = {
  useful: "training that counts",
  redone: "training that a failure threw away",
  starting: "imports, process starts, the script up to its training",
  rendezvous: "stopping after a failure, waiting for nodes",
  restore: "reading the state of a commit",
  commit: "waiting for commits",
  data_wait: "waiting for data",
  resize: "planned changes",
  hang: "hung until it was noticed",
  idle: "spare, cordoned, dropped or suspended",
  lost: "silent before it was given up",
};

export function Goodput({ model }) {
  const { total, parts } = goodput(model.status);
  return html`
    <${Panel} id="goodput" title="Goodput" wide="third">
      ${total === 0 && html`<p class="empty">Counting begins with the first node.</p>`}
      ${total > 0 && html`
        <div class="bar" aria-hidden="true">
          ${parts.map((one) => html`<span key=${one.name} class=${`use-${one.name}`} style=${{ flexGrow: one.value / total }}></span>`)}
        </div>
        <table class="plain-table">
          <caption class="hidden">Slot time by use</caption>
          <thead class="hidden"><tr><th scope="col">Use</th><th scope="col">Share</th><th scope="col">Slot time</th></tr></thead>
          <tbody>
            ${parts.map((one) => html`
              <tr key=${one.name}>
                <th scope="row"><span class=${`swatch use-${one.name}`} aria-hidden="true"></span>${one.name.replaceAll("_", " ")}
                  <span class="quiet meaning">${MEANINGS[one.name] ?? ""}</span></th>
                <td class="number">${percent(one.value / total)}</td>
                <td class="number quiet">${duration(one.value)}</td>
              </tr>`)}
          </tbody>
        </table>`}
    <//>`;
}
