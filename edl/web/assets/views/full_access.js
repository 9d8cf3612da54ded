// Shows its children to those with full access. Others are asked for a token that has it.
import { html } from "../html.js";
import { TokenForm } from "./token_form.js";

/** `what`: what the access is needed for. */
export function FullAccess({ model, what, close, children }) {
  if (model.rights === "full") return children;
  return html`
    <p>Your token can only read. “${what}” needs one with full access.</p>
    <${TokenForm} label="Token with full access" why="" enter=${(token) => model.unlock(token)} cancel=${close} />`;
}
