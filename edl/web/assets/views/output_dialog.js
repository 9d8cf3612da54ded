// The output of a node's workers as it comes, or their stacks.
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { html } from "../html.js";
import { appended } from "../lines.js";
import { Dialog } from "./dialog.js";
import { FullAccess } from "./full_access.js";

const POLL_MS = 2_000;
const LINES = 200;

export const OUTPUT = "output";
export const STACKS = "stacks";
const TITLES = { [OUTPUT]: "Output of node", [STACKS]: "Stacks of node" };

export function OutputDialog({ model, kind, node, close }) {
  const title = `${TITLES[kind]} ${node.node}`;
  return html`
    <${Dialog} title=${title} onClose=${close} wide=${true}>
      <${FullAccess} model=${model} what=${title} close=${close}>
        <${Lines} model=${model} kind=${kind} node=${node} close=${close} />
      <//>
    <//>`;
}

function Lines({ model, kind, node, close }) {
  const [lines, setLines] = useState([]);
  const [state, setState] = useState("Asking the launcher of the node…");
  const [asked, setAsked] = useState(0);
  const place = useRef(null);
  const atEnd = useRef(true);
  useEffect(() => {
    let timer = 0;
    let after = 0;
    let over = false;
    const ask = async () => {
      try {
        const found = kind === OUTPUT ? await model.output(node, after, LINES) : await model.stacks(node);
        if (over) return;
        setLines((shown) => appended(after ? shown : [], found.lines, found.gap));
        setState(found.lines.length || after ? "" : kind === OUTPUT ? "No worker has written anything." : "No worker runs.");
        after = found.next;
      } catch (error) {
        if (over) return;
        setState(error.message);
      }
      if (kind === OUTPUT) timer = setTimeout(ask, POLL_MS);
    };
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [asked]);
  useEffect(() => {
    if (kind === OUTPUT && atEnd.current && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [lines]);
  const scrolled = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    atEnd.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  return html`
    <p class="quiet small">${kind === OUTPUT ? "The rank is in front of each line. New lines are added every two seconds." : "The workers continue to run."}</p>
    <p class="problem" role="status">${state}</p>
    ${lines.length > 0 && html`<pre class="lines" ref=${place} tabindex="0" aria-label="Lines" onScroll=${scrolled}>${lines.join("\n")}</pre>`}
    <div class="buttons">
      ${kind === STACKS && html`<button type="button" onClick=${() => setAsked(asked + 1)}>Ask again</button>`}
      <button type="button" onClick=${close}>Close</button>
    </div>`;
}
