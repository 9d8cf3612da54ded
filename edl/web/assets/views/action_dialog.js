// Says what an action will do, and does it after a confirmation. Without full access it asks for a token first.
import { useState } from "../vendor/hooks.js";
import { html } from "../html.js";
import { Dialog } from "./dialog.js";
import { FullAccess } from "./full_access.js";

export function ActionDialog({ model, action, node, close }) {
  const { status } = model;
  const field = action.field?.(status);
  const [value, setValue] = useState(field?.value);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    const wrong = await model.act(action, node, field ? Number(value) : undefined);
    setBusy(false);
    if (wrong) setProblem(wrong);
    else close();
  };
  return html`
    <${Dialog} title=${action.title(status, node)} onClose=${close} danger=${action.danger}>
      <${FullAccess} model=${model} what=${action.title(status, node)} close=${close}>
      <form onSubmit=${submit}>
        <p>${action.text(status, node)}</p>
        ${field && html`
          <label class="field">${field.label}
            <input type="number" required value=${value} min=${field.min} max=${field.max} step=${field.step}
              onInput=${(event) => setValue(event.target.value)} />
          </label>`}
        <p class="problem" role="alert">${problem}</p>
        <div class="buttons">
          <button type="button" onClick=${close} autofocus=${action.danger}>Cancel</button>
          <button class=${action.danger ? "danger" : "primary"} disabled=${busy}>${action.name}</button>
        </div>
      </form>
      <//>
    <//>`;
}
