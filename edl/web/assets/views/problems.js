// What needs attention, the worst first. Screen readers announce what is new.
import { html } from "../html.js";

const ORDER = ["critical", "warning", "info"];

/** What the size of the job waits for, without the reason that the page shows above it. */
function pendingOf({ reason, scale: { waiting } }) {
  if (waiting === reason) return "";
  return waiting.startsWith(`${reason}; `) ? waiting.slice(reason.length + 2) : waiting;
}

/** All problems of a status: `{severity, what, text}`. Pure. */
export function problemsOf(status) {
  const found = status.alarms.map((alarm) => ({
    severity: alarm.severity,
    what: [alarm.name, alarm.node, alarm.about].filter(Boolean).join(" · "),
    text: alarm.text,
  }));
  for (const text of status.warnings) found.push({ severity: "warning", what: "warning", text });
  for (const text of status.flaws) found.push({ severity: "warning", what: "incomplete", text });
  for (const one of status.health ?? []) {
    const known = one.excluded && one.state !== "checking"; // a check is part of each start, and soon over
    if (known || one.state === "faulty") found.push({ severity: "warning", what: `health · ${one.node}`, text: one.why ? `${one.state}: ${one.why}` : one.state });
  }
  for (const one of status.dropped) {
    const text = `slot ${one.slot} of ${one.node} takes no part since round ${one.round}: ${one.why}`;
    found.push({ severity: "warning", what: "dropped slot", text });
  }
  if (status.kill) found.push({ severity: "critical", what: "ending", text: `stop requested by ${status.kill}` });
  const pending = pendingOf(status);
  if (pending) found.push({ severity: "info", what: "pending", text: pending });
  if (status.boundary) found.push({ severity: "info", what: "step boundary", text: status.boundary });
  const rank = (one) => (ORDER.indexOf(one.severity) + ORDER.length + 1) % (ORDER.length + 1);
  return found.sort((one, other) => rank(one) - rank(other));
}

export function Problems({ model }) {
  const found = model.status ? problemsOf(model.status) : [];
  const ended = model.status?.phase === "ended";
  return html`
    <section class="problems" aria-live="polite" aria-label="Alarms and warnings">
      ${ended && html`<p class="problem-line info"><strong>The job has ended</strong> ${model.status.reason}</p>`}
      ${model.lost && !ended && html`<p class="problem-line bad"><strong>Not connected</strong> ${model.lost}. ${model.status ? "The page shows the last known status." : ""}</p>`}
      ${model.moved && !model.lost && html`
        <p class="problem-line info"><strong>Elsewhere</strong> the launcher at this address no longer answers.
          <a href=${new URL("dashboard", model.base).href}>${new URL(model.base).host}</a> does.</p>`}
      ${found.map((one) => html`
        <p key=${one.what + one.text} class=${`problem-line ${{ critical: "bad", info: "info" }[one.severity] ?? "warn"}`}>
          <strong>${one.what}</strong> ${one.text}</p>`)}
    </section>`;
}
