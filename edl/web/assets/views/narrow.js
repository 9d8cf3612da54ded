// Whether the screen is that of a phone.
import { useEffect, useState } from "../vendor/hooks.js";

const QUERY = matchMedia("(max-width: 640px)");

export function useNarrow() {
  const [narrow, setNarrow] = useState(QUERY.matches);
  useEffect(() => {
    const listen = (event) => setNarrow(event.matches);
    QUERY.addEventListener("change", listen);
    return () => QUERY.removeEventListener("change", listen);
  }, []);
  return narrow;
}
