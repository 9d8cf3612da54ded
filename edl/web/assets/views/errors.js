// The failed workers of the last incident, the root cause first.
import { clock } from "../format.js";
import { html } from "../html.js";
import { Panel } from "./panel.js";

const MOST = 50;

export function Errors({ model }) {
  const { failures } = model.status;
  if (!failures.length) return null;
  const sorted = [...failures].sort((one, other) => one.peer_loss - other.peer_loss);
  const now = model.nowS();
  return html`
    <${Panel} id="errors" title="Errors of the last incident" wide="full"
      note=${failures.length > MOST ? `${MOST} of ${failures.length}` : ""}>
      ${sorted.slice(0, MOST).map((failure, at) => html`
        <details key=${`${failure.round}-${failure.rank}`} class="error">
          <summary>
            <span class=${`tag ${failure.peer_loss ? "" : "bad"}`}>${failure.peer_loss ? "consequence" : at === 0 ? "root cause" : "failed"}</span>
            <span class="what">rank ${failure.rank} on ${failure.node}: ${failure.exception || failure.what}</span>
            <span class="quiet">${failure.time_s ? clock(failure.time_s, now) : ""}</span>
          </summary>
          <p class="quiet small">round ${failure.round}, local rank ${failure.local_rank}, ${failure.what}${failure.pid ? `, pid ${failure.pid}` : ""}${failure.host ? ` on ${failure.host}` : ""}${failure.error_file ? `, ${failure.error_file}` : ""}</p>
          ${failure.traceback && html`<pre tabindex="0" aria-label="Traceback">${failure.traceback}</pre>`}
          ${failure.tail && html`<h3>Last lines of stderr</h3><pre tabindex="0" aria-label="Last lines of stderr">${failure.tail}</pre>`}
          ${!failure.traceback && !failure.tail && html`<p class="quiet small">It left no traceback and wrote nothing to stderr.</p>`}
        </details>`)}
    <//>`;
}
