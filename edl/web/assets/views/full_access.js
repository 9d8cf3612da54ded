// Shows its children to those with a token that has full access. Others are asked for one, also those who have got in by
// a certificate: with that alone, the server takes no requests of a page.
import { html } from "../html.js";
import { TokenForm } from "./token_form.js";

/** `what`: what the access is needed for. */
export function FullAccess({ model, what, close, children }) {
  if (model.rights === "full" && model.token) return children;
  return html`
    <p>“${what}” needs a token with full access.</p>
    <${TokenForm} label="Token with full access" why="" enter=${(token) => model.unlock(token)} cancel=${close} />`;
}
