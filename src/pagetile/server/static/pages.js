// The page: keeps the last 60 seconds of snapshots, shows one of them, and listens to keys.
import { CellMap, drawSample, STATES } from "/pages/cells.js";
import { Timeline } from "/pages/timeline.js";

const KEPT = 300; // snapshots: 60 seconds at 5 a second
const get = (id) => document.getElementById(id);

const frames = [];
let shown = -1; // index into frames; the last one while live
let isPaused = false;
let selected = null; // id of a sequence

const map = new CellMap(get("cells"), get("frame"));
const timeline = new Timeline(get("timeline"), (index) => pauseAt(index));

function decode(frame) {
  const bytes = Uint8Array.from(atob(frame.cells), (c) => c.charCodeAt(0));
  const count = { free: 0, cached: 0, held: 0, shared: 0 };
  for (const holders of bytes) {
    if (holders === 0) count.free += 1;
    else if (holders === 255) count.cached += 1;
    else {
      count.held += 1;
      if (holders > 1) count.shared += 1;
    }
  }
  return { ...frame, cells: bytes, count, written: new Set(frame.written) };
}

function connect() {
  const source = new EventSource("/pages/frames");
  source.onmessage = (event) => {
    frames.push(decode(JSON.parse(event.data)));
    if (frames.length > KEPT) {
      frames.shift();
      if (isPaused) shown = Math.max(0, shown - 1);
    }
    if (!isPaused) shown = frames.length - 1;
    render();
  };
  source.onopen = render;
  source.onerror = () => setStatus("lost", "no connection; trying again");
}

function setStatus(state, text) {
  get("status").dataset.state = state;
  get("status").textContent = text;
}

function pauseAt(index) {
  if (!frames.length) return;
  isPaused = true;
  shown = Math.min(Math.max(index, 0), frames.length - 1);
  render();
}

function goLive() {
  isPaused = false;
  shown = frames.length - 1;
  render();
}

function render() {
  const frame = frames[shown];
  if (!frame) return;
  const seconds = (frames[frames.length - 1].time - frame.time).toFixed(1);
  if (isPaused) setStatus("paused", seconds > 0 ? `${seconds} s ago` : "paused");
  else setStatus("live", "live");
  get("pause").setAttribute("aria-pressed", String(isPaused));
  get("pause").textContent = isPaused ? "Resume" : "Pause";
  if (selected && !frame.sequences.some((s) => s.id === selected)) selected = null;
  const chosen = frame.sequences.find((s) => s.id === selected) ?? null;
  summarise(frame);
  map.show(frame, chosen);
  get("cells").dataset.time = frame.time;
  timeline.show(frames, shown);
  listSequences(frame);
  describe(frame, chosen);
}

function summarise(frame) {
  const { count } = frame;
  Object.assign(document.body.dataset, { ...count, numBlocks: frame.num_blocks });
  const share = ((100 * count.held) / frame.num_blocks).toFixed(0);
  const saved = frame.counts.prompt_tokens
    ? `${((100 * frame.counts.cached_tokens) / frame.counts.prompt_tokens).toFixed(0)} % of prompt tokens found cached`
    : "nothing looked up yet";
  get("summary").textContent =
    `${frame.num_blocks.toLocaleString()} blocks of ${frame.block_size} tokens, ${share} % held · ` +
    `${frame.sequences.length} running, ${frame.waiting} waiting · ` +
    `${Math.round(frame.tokens_per_second).toLocaleString()} tokens/s · ${saved} · ` +
    `${frame.counts.copied_blocks.toLocaleString()} copied on write · ` +
    `${frame.counts.preemptions.toLocaleString()} preempted`;
  const counts = { ...count, written: frame.written.size };
  for (const state of STATES) {
    get(`count-${state.name}`).textContent = counts[state.name].toLocaleString();
  }
}

function makeLegend() {
  for (const state of STATES) {
    const item = document.createElement("li");
    const sample = document.createElement("canvas");
    sample.dataset.state = state.name;
    const count = document.createElement("b");
    count.id = `count-${state.name}`;
    count.textContent = "–";
    item.append(sample, count, document.createTextNode(state.text));
    get("legend").append(item);
  }
  drawLegend();
}

function drawLegend() {
  for (const sample of document.querySelectorAll("#legend canvas")) drawSample(sample);
}

// Elements are kept and brought up to date: one that is replaced while a mouse button is down gets
// no click, and a block table may have thousands.
function fitChildren(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
  return parent.children;
}

function makeRow() {
  const row = document.createElement("div");
  row.className = "sequence";
  row.setAttribute("role", "option");
  const [name, bar, tokens] = [0, 1, 2].map(() => document.createElement("span"));
  bar.className = "bar";
  tokens.className = "tokens";
  for (const kind of ["shared", "own"]) {
    const piece = document.createElement("i");
    piece.className = kind;
    bar.append(piece);
  }
  row.append(name, bar, tokens);
  return row;
}

function listSequences(frame) {
  get("num-sequences").textContent = `${frame.sequences.length} running, ${frame.waiting} waiting`;
  get("empty").hidden = frame.sequences.length > 0;
  const longest = Math.max(1, ...frame.sequences.map((s) => s.blocks.length));
  const rows = fitChildren(get("sequences"), frame.sequences.length, makeRow);
  frame.sequences.forEach((sequence, index) => {
    const row = rows[index];
    const [name, bar, tokens] = row.children;
    const shared = sequence.blocks.filter((b) => frame.cells[b] > 1 && frame.cells[b] < 255).length;
    row.id = `sequence-${sequence.id}`;
    row.dataset.id = sequence.id;
    row.setAttribute("aria-selected", String(sequence.id === selected));
    name.textContent = sequence.sample ? `#${sequence.request} · ${sequence.sample}` : `#${sequence.request}`;
    bar.children[0].style.width = `${(100 * shared) / longest}%`;
    bar.children[1].style.width = `${(100 * (sequence.blocks.length - shared)) / longest}%`;
    tokens.textContent = `${sequence.tokens}`;
  });
  get("sequences").setAttribute("aria-activedescendant", selected ? `sequence-${selected}` : "");
}

function describe(frame, sequence) {
  get("details").hidden = !sequence;
  if (!sequence) return;
  const sharedWith = new Set();
  const own = new Set(sequence.blocks);
  for (const other of frame.sequences) {
    if (other.id !== sequence.id && other.blocks.some((b) => own.has(b))) sharedWith.add(`#${other.request}`);
  }
  get("details-title").textContent = `Sequence #${sequence.request}, sample ${sequence.sample}`;
  get("details-facts").textContent =
    `${sequence.prompt_tokens} prompt tokens, ${sequence.cached_tokens} of them found cached; ` +
    `${sequence.tokens} in the cache, in ${sequence.blocks.length} blocks. ` +
    (sharedWith.size ? `Shares with ${[...sharedWith].join(", ")}.` : "Shares with no other.");
  const items = fitChildren(get("table"), sequence.blocks.length, () => document.createElement("li"));
  sequence.blocks.forEach((block, place) => {
    const item = items[place];
    if (item.textContent !== String(block)) item.textContent = block;
    item.classList.toggle("shared", frame.cells[block] > 1 && frame.cells[block] < 255);
    item.classList.toggle("written", frame.written.has(block));
  });
  get("text").hidden = sequence.text === undefined;
  get("text").textContent = sequence.text ?? "";
}

function select(id) {
  selected = selected === id ? null : id;
  render();
  if (selected) get(`sequence-${selected}`)?.scrollIntoView({ block: "nearest" });
}

function selectBy(step) {
  const ids = (frames[shown]?.sequences ?? []).map((s) => s.id);
  if (!ids.length) return;
  const at = ids.indexOf(selected);
  selected = ids[at < 0 ? (step > 0 ? 0 : ids.length - 1) : (at + step + ids.length) % ids.length];
  render();
  get(`sequence-${selected}`)?.scrollIntoView({ block: "nearest" });
}

function holdersOf(block) {
  return (frames[shown]?.sequences ?? []).filter((s) => s.blocks.includes(block));
}

function showTooltip(event) {
  const frame = frames[shown];
  const block = map.blockAt(event.offsetX, event.offsetY);
  const tip = get("tooltip");
  tip.hidden = !frame || block === null;
  if (tip.hidden) return;
  const state = frame.cells[block];
  const holders = holdersOf(block);
  const words =
    state === 0 ? "free" : state === 255 ? "free, content kept for its prefix"
      : state === 1 ? "held" : `shared by ${state}`;
  const written = frame.written.has(block) ? "\nwritten to since the last snapshot" : "";
  const names = holders.slice(0, 6).map((s) => `#${s.request}.${s.sample} (place ${s.blocks.indexOf(block)})`);
  tip.textContent = `block ${block}: ${words}${written}${names.length ? `\n${names.join(", ")}` : ""}`;
  const right = event.offsetX + 280 > get("frame").clientWidth;
  tip.style.left = right ? "auto" : `${event.offsetX + 14}px`;
  tip.style.right = right ? `${get("frame").clientWidth - event.offsetX + 10}px` : "auto";
  tip.style.top = `${event.offsetY + 14}px`;
}

function toggleTheme() {
  const isDark = getComputedStyle(document.body).getPropertyValue("--back").trim() === "#11151b";
  setTheme(isDark ? "light" : "dark");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("pagetile-theme", theme);
  } catch { /* a browser that keeps nothing forgets the theme */ }
  drawLegend();
  render();
}

const KEYS = {
  " ": () => (isPaused ? goLive() : pauseAt(shown)),
  ArrowLeft: () => pauseAt(shown - 1),
  ArrowRight: () => pauseAt(shown + 1),
  Home: () => pauseAt(0),
  End: goLive,
  ArrowDown: () => selectBy(1),
  ArrowUp: () => selectBy(-1),
  Escape: () => selected && select(selected),
  t: toggleTheme,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target instanceof HTMLButtonElement) return;
  const act = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (act) {
    event.preventDefault();
    act();
  }
});
get("pause").addEventListener("click", KEYS[" "]);
get("back").addEventListener("click", KEYS.ArrowLeft);
get("forward").addEventListener("click", KEYS.ArrowRight);
get("live").addEventListener("click", goLive);
get("theme").addEventListener("click", toggleTheme);
let pressed; // the sequence under the button when it went down: rows move up when others end
get("sequences").addEventListener("pointerdown", (event) => {
  pressed = event.target.closest(".sequence")?.dataset.id;
});
get("sequences").addEventListener("click", (event) => {
  // A click from the keyboard or a screen reader presses no button.
  const id = event.detail > 0 ? pressed : event.target.closest(".sequence")?.dataset.id;
  if (id) select(id);
});
get("cells").addEventListener("mousemove", showTooltip);
get("cells").addEventListener("mouseleave", () => (get("tooltip").hidden = true));
get("cells").addEventListener("click", (event) => {
  const block = map.blockAt(event.offsetX, event.offsetY);
  const holders = block === null ? [] : holdersOf(block);
  if (holders.length) {
    const at = holders.findIndex((s) => s.id === selected);
    select(holders[(at + 1) % holders.length].id);
  }
});
new ResizeObserver(render).observe(get("frame"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLegend();
  render();
});
try {
  const kept = localStorage.getItem("pagetile-theme");
  if (kept) document.documentElement.dataset.theme = kept;
} catch { /* see above */ }
makeLegend();
connect();
