// A table of any length: only the rows in view, and a few around them, are in the document.
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "../html.js";

const AROUND = 6;

/** Rows to draw: from `first` up to, not including, `end`. Pure. */
export function windowOf(scrollTop, height, rowHeight, rows) {
  const first = Math.max(0, Math.min(Math.floor(scrollTop / rowHeight) - AROUND, rows - 1));
  return { first, end: Math.min(rows, Math.ceil((scrollTop + height) / rowHeight) + AROUND) };
}

/** `columns`: `{name, head, cell(row), className, sorted, sort}`. `onEnd`: called when the last row is in view. */
export function VirtualTable({ label, columns, rows, keyOf, rowHeight, height, toneOf, onEnd, empty }) {
  const scroller = useRef(null);
  const [scrollTop, setScrollTop] = useState(0);
  const top = useRef({ key: null, rows: 0 });
  const shown = windowOf(scrollTop, height, rowHeight, rows.length);
  useLayoutEffect(() => {
    // New rows above the view must not move what is being read.
    const key = rows.length ? keyOf(rows[0]) : null;
    const before = top.current.key;
    if (before !== null && key !== before && scroller.current.scrollTop > rowHeight) {
      const added = rows.findIndex((row) => keyOf(row) === before);
      if (added > 0) scroller.current.scrollTop += added * rowHeight;
    }
    top.current = { key, rows: rows.length };
  }, [rows]);
  useEffect(() => {
    if (onEnd && rows.length && shown.end === rows.length && scrollTop > 0) onEnd();
  }, [shown.end, rows.length]);
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  const space = (count) => count > 0 && html`
    <tr class="space" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${count * rowHeight}px` }}></td></tr>`;
  return html`
    <div class="scroller" ref=${scroller} role="region" aria-label=${`Table: ${label}`} tabindex="0" style=${{ maxHeight: `${height}px` }}
      onScroll=${(event) => setScrollTop(event.currentTarget.scrollTop)}>
      <table aria-rowcount=${rows.length + 1}>
        <thead><tr aria-rowindex="1">${columns.map((column) => html`<${Head} key=${column.name} column=${column} />`)}</tr></thead>
        <tbody>
          ${space(shown.first)}
          ${rows.slice(shown.first, shown.end).map((row, at) => html`
            <tr key=${keyOf(row)} aria-rowindex=${shown.first + at + 2} class=${toneOf?.(row) ?? ""} style=${{ height: `${rowHeight}px` }}>
              ${columns.map((column) => html`<td key=${column.name} class=${column.className ?? ""}>${column.cell(row)}</td>`)}
            </tr>`)}
          ${space(rows.length - shown.end)}
        </tbody>
      </table>
    </div>`;
}

function Head({ column }) {
  const content = column.sort
    ? html`<button type="button" class="plain" onClick=${column.sort}>${column.head}<span aria-hidden="true">${column.sorted ? (column.sorted === "ascending" ? " ↑" : " ↓") : ""}</span></button>`
    : column.head;
  return html`<th scope="col" class=${column.className ?? ""} aria-sort=${column.sorted || undefined}>${content}</th>`;
}
