// Light or dark: as the system prefers, unless the user has chosen.

const KEY = "edl-theme";
export const THEMES = ["auto", "light", "dark"];

export function readTheme() {
  const found = localStorage.getItem(KEY);
  return THEMES.includes(found) ? found : "auto";
}

export function useTheme(theme) {
  localStorage.setItem(KEY, theme);
  apply(theme);
}

export function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
