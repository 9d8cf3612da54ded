// A modal dialog: the browser's own, which keeps the focus inside and gives it back.
import { useEffect, useRef } from "../vendor/hooks.js";
import { html } from "../html.js";

let named = 0;

/** `onClose` is called when it is closed in any way. */
export function Dialog({ title, onClose, danger, wide, children }) {
  const element = useRef(null);
  const id = useRef("");
  id.current ||= `dialog-${(named += 1)}`;
  useEffect(() => {
    element.current.showModal();
    return () => element.current?.close();
  }, []);
  return html`
    <dialog ref=${element} class=${`${danger ? "danger" : ""} ${wide ? "wide" : ""}`} aria-labelledby=${id.current} onClose=${onClose}>
      <h2 id=${id.current}>${title}</h2>
      ${children}
    </dialog>`;
}
