// Reading metrics in Prometheus' text format.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples of a page, each {name, labels, value}. */
export function readMetrics(page) {
  const samples = [];
  for (const line of page.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(LABEL)].map(([, key, value]) => [key, value]),
    );
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/** Return the values of the server that the live mode shows; null if the page has none of them.
 *
 * modes: steps so far, by adapter mode. mode: that of the last step. waiting: requests before the
 * engine or in its queue. running, superseded: numbers of requests. adapters: names of the loaded ones.
 */
export function serverState(page) {
  const samples = readMetrics(page);
  const of = (name) => samples.filter((sample) => sample.name === name);
  const sum = (name) => of(name).reduce((total, { value }) => total + value, 0);
  const steps = of("vlora:mode_steps_total");
  if (!steps.length) return null;
  const newest = of("vllm:lora_requests_info").sort((one, two) => two.value - one.value)[0];
  return {
    modes: Object.fromEntries(steps.map(({ labels, value }) => [labels.mode, value])),
    mode: of("vlora:mode").find(({ value }) => value === 1)?.labels.mode ?? "none",
    waiting: sum("vllm:num_requests_waiting") + sum("vlora:requests_before_engine"),
    running: sum("vllm:num_requests_running"),
    superseded: sum("vlora:requests_superseded_total"),
    adapters: newest?.labels.running_lora_adapters ?? "",
  };
}
