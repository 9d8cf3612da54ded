// A modal dialog: the browser's own, which keeps the focus inside and gives it back.
import { useEffect, useRef } from "../vendor/hooks.js";
import { html } from "../html.js";

let named = 0;

/** `onClose` is called when it is closed in any way. */
export function Dialog({ title, onClose, danger, wide, children }) {
  const element = useRef(null);
  const over = useRef(false);
  const id = useRef("");
  id.current ||= `dialog-${(named += 1)}`;
  useEffect(() => {
    const shown = element.current;
    shown.showModal();
    return () => {
      over.current = true; // its event comes later, when there may be another dialog
      shown.close(); // gives the focus back
    };
  }, []);
  return html`
    <dialog ref=${element} class=${`${danger ? "danger" : ""} ${wide ? "wide" : ""}`} aria-labelledby=${id.current} onClose=${() => over.current || onClose()}>
      <h2 id=${id.current}>${title}</h2>
      ${children}
    </dialog>`;
}
