// Reads server-sent events from the body of a response. EventSource cannot send a token; fetch can.

/** The events of a text as far as it is complete, and the rest of the text. Pure. */
export function parse(text) {
  const blocks = text.split(/\r?\n\r?\n/);
  const rest = blocks.pop();
  return [blocks.map(parseBlock).filter((event) => event.data !== ""), rest];
}

function parseBlock(block) {
  const event = { event: "message", id: "", data: "" };
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*)(?:: ?([^]*))?$/.exec(line);
    if (name === "data") data.push(value ?? "");
    else if (name === "event" || name === "id") event[name] = value ?? "";
  }
  event.data = data.join("\n");
  return event;
}

/** Yields the events of a stream. `alive` is called whenever anything arrives, heartbeats included. */
export async function* read(body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    const [events, rest] = parse(text + value);
    text = rest;
    yield* events;
  }
}
