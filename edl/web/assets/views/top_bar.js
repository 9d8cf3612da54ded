// The line at the top: the job, its phase, the connection, and what can be done.
import { useState } from "../vendor/hooks.js";
import * as actions from "../actions.js";
import { html } from "../html.js";
import { THEMES, readTheme, useTheme } from "../theme.js";

const TONES = { running: "good", ended: "calm", suspended: "warn", forming: "warn" };

export function TopBar({ model, act }) {
  const { status, lost } = model;
  const able = status && !lost && status.phase !== "ended";
  const suspended = status?.scale.suspended;
  const offered = [actions.checkpoint, actions.scale, suspended ? actions.resume : actions.suspend, actions.stop];
  return html`
    <header class="top">
      <div class="who">
        <img src="assets/icon.svg" alt="" width="22" height="22" />
        <h1>${model.job || "edl"}</h1>
        ${status && html`<span class=${`badge ${TONES[status.phase] ?? "warn"}`}>${status.phase}</span>`}
        ${status && html`<span class="quiet">round ${status.round}</span>`}
        <${Connection} model=${model} />
      </div>
      <div class="tools">
        ${able && offered.map((action) => html`
          <button type="button" key=${action.name} class=${action.danger ? "danger" : ""} onClick=${() => act(action)}>${action.name}…</button>`)}
        <${Theme} />
        ${model.rights && html`
          <button type="button" class="plain" onClick=${() => model.leave()}
            title="Forget the token">${model.rights === "full" ? "Full access" : "Read-only"} · sign out</button>`}
      </div>
    </header>`;
}

function Connection({ model }) {
  if (model.status?.phase === "ended") return html`<span class="dot calm" role="status">last status</span>`;
  const text = model.lost ? "reconnecting" : model.status ? "live" : "connecting";
  return html`<span class=${`dot ${model.lost ? "bad" : model.status ? "good" : "calm"}`} role="status">${text}</span>`;
}

function Theme() {
  const [theme, setTheme] = useState(readTheme());
  const choose = (event) => {
    useTheme(event.target.value);
    setTheme(event.target.value);
    dispatchEvent(new Event("theme"));
  };
  return html`
    <label class="theme"><span class="hidden">Colours</span>
      <select value=${theme} onChange=${choose}>
        ${THEMES.map((one) => html`<option key=${one} value=${one}>${{ auto: "Auto", light: "Light", dark: "Dark" }[one]}</option>`)}
      </select>
    </label>`;
}
