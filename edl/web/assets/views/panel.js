// A titled part of the page.
import { html } from "../html.js";

export function Panel({ id, title, note, wide, children }) {
  return html`
    <section id=${id} class=${`panel ${wide ?? ""}`} aria-labelledby=${`${id}-title`}>
      <header><h2 id=${`${id}-title`}>${title}</h2>${note && html`<p class="note">${note}</p>`}</header>
      ${children}
    </section>`;
}
