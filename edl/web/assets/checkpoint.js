// The newest checkpoint and its age. Pure.

const COMPLETE = /^commit (\d+) is complete in /;

/** `ageS` is null if the history no longer says when it was complete; `behind`: newer commits than that. */
export function checkpointOf(status, entries, nowS) {
  const { commit } = status.saved;
  let ageS = null;
  for (let at = entries.length - 1; commit && at >= 0; at -= 1) {
    const found = entries[at].kind === "state" && COMPLETE.exec(entries[at].text);
    if (found && Number(found[1]) === commit) {
      ageS = Math.max(0, nowS - entries[at].at_s);
      break;
    }
  }
  const sameEra = status.saved.era === status.era;
  return { commit, ageS, behind: commit && sameEra ? Math.max(0, status.commit - commit) : 0 };
}
