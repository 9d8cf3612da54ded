// Asks for a token.
import { useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "../html.js";

/** `enter(token)` returns, or promises, what is wrong with it. */
export function TokenForm({ label, why, enter, cancel }) {
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const token = new FormData(event.target).get("token").trim();
    if (!token) return setProblem("Enter a token.");
    setBusy(true);
    setProblem((await enter(token)) ?? "");
    setBusy(false);
  };
  const said = problem || why;
  const input = useRef(null);
  useLayoutEffect(() => {
    if (said) input.current.select(); // what is typed next replaces it
  }, [said]);
  return html`
    <form class="token" onSubmit=${submit}>
      <label for="token">${label}</label>
      <input ref=${input} id="token" name="token" type="password" autocomplete="off" spellcheck=${false} autofocus
        aria-describedby="token-help" aria-invalid=${said ? "true" : "false"} />
      <p id="token-help" class="hint">
        <code>edl token</code> prints the job's own; <code>--http-read-token-file</code> has those that can only read.
        It is kept in this tab until the tab is closed.
      </p>
      <p class="problem" role="alert">${said}</p>
      <div class="buttons">
        ${cancel && html`<button type="button" onClick=${cancel}>Cancel</button>`}
        <button class="primary" disabled=${busy}>Open</button>
      </div>
    </form>`;
}
