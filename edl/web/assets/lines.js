// Lines that workers have written, made fit to be read. Pure.

const SEQUENCE = new RegExp(
  "\\u001b(?:\\[[0-?]*[ -/]*(?:[@-~]|$)|[\\]PX^_][^\\u0007\\u001b]*(?:\\u0007|\\u001b\\\\|$)|[ -/]*[0-~]|$)", "g",
);
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
export const MOST_LINES = 2_000;
const GAP = "(some lines are missing: more were written than are kept)";

/** A line without escape sequences and control characters. Of one that was drawn over, such as a progress bar, the last
 * state remains. */
export function printable(text) {
  const plain = text.replace(SEQUENCE, "").replace(/\r+$/, "");
  return plain.slice(plain.lastIndexOf("\r") + 1).replace(CONTROL, "").trimEnd();
}

/** Lines with the ranks of their workers in front, of both lists, at most `most`. `gap`: some are missing in between. */
export function appended(shown, lines, gap = false, most = MOST_LINES) {
  const more = lines.map((line) => `[${line.rank < 0 ? "-" : line.rank}] ${printable(line.text)}`);
  return [...shown, ...(gap ? [GAP] : []), ...more].slice(-most);
}
