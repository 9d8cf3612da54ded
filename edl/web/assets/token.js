// The token of this tab. It is kept until the tab is closed, and never put into an address.

const KEY = "edl-token";

export const readToken = () => sessionStorage.getItem(KEY) ?? "";

export function keepToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}
