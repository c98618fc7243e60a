// The grid: every block a cell. A state is told by colour and by shape.
//
//   free     an empty outline          held     a full cell
//   cached   a small dot in it         shared   full, another colour, a cut corner, how many hold it
//   written  a light square inside     selected the other cells fade

export const STATES = [
  { name: "free", text: "free" },
  { name: "cached", text: "free, content kept" },
  { name: "held", text: "held" },
  { name: "shared", text: "of them shared" },
  { name: "written", text: "just written" },
];

const LARGEST = 44; // pixels of a cell

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ["free", "cached", "held", "shared", "on-shared", "written", "mark", "text"].map((n) => [n, of(n)]),
  );
}

function fit(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function drawCell(context, colour, x, y, size, holders, isWritten) {
  const gap = size >= 8 ? 2 : size >= 4 ? 1 : 0;
  const side = size - gap;
  if (holders === 0 || holders === 255) {
    context.strokeStyle = colour.free;
    context.lineWidth = 1;
    if (side >= 5) context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    else {
      context.fillStyle = colour.free;
      context.fillRect(x, y, side, side);
    }
    if (holders === 255) {
      context.fillStyle = colour.cached;
      const dot = Math.max(2, Math.round(side * 0.5));
      const inset = Math.floor((side - dot) / 2); // whole pixels: small cells would be a blur
      context.fillRect(x + inset, y + inset, dot, dot);
    }
    return;
  }
  context.fillStyle = holders > 1 ? colour.shared : colour.held;
  if (holders > 1 && side >= 6) {
    const cut = side * 0.3;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + side - cut, y);
    context.lineTo(x + side, y + cut);
    context.lineTo(x + side, y + side);
    context.lineTo(x, y + side);
    context.fill();
  } else {
    context.fillRect(x, y, side, side);
  }
  if (holders > 1 && side >= 12) {
    context.fillStyle = colour["on-shared"];
    context.font = `600 ${Math.floor(side * 0.58)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(holders > 9 ? "+" : String(holders), x + side / 2, y + side / 2 + 1);
  }
  if (isWritten) {
    context.fillStyle = colour.written;
    const dot = Math.max(2, Math.round(side * 0.36));
    if (holders > 1) {
      const mark = Math.max(1, Math.round(dot / 1.5));
      context.fillRect(x + 1, y + side - mark - 1, mark, mark);
    } else {
      const inset = Math.floor((side - dot) / 2);
      context.fillRect(x + inset, y + inset, dot, dot);
    }
  }
}

export function drawSample(canvas) {
  const context = fit(canvas, 18, 18);
  const holders = { free: 0, cached: 255, held: 1, shared: 3, written: 1 }[canvas.dataset.state];
  drawCell(context, colours(), 0, 0, 18, holders, canvas.dataset.state === "written");
}

export class CellMap {
  constructor(canvas, frame) {
    this.canvas = canvas;
    this.frame = frame;
    this.size = 1;
    this.columns = 1;
    this.count = 0;
  }

  blockAt(x, y) {
    const column = Math.floor(x / this.size);
    const block = Math.floor(y / this.size) * this.columns + column;
    return column < this.columns && block >= 0 && block < this.count ? block : null;
  }

  show(snapshot, chosen) {
    const { clientWidth: width, clientHeight: height } = this.frame;
    if (!width || !height) return;
    this.count = snapshot.num_blocks;
    this.layOut(width, height);
    const context = fit(this.canvas, width, height);
    const colour = colours();
    const own = new Set(chosen?.blocks ?? []);
    for (let block = 0; block < this.count; block += 1) {
      const x = (block % this.columns) * this.size;
      const y = Math.floor(block / this.columns) * this.size;
      context.globalAlpha = chosen && !own.has(block) ? 0.22 : 1;
      drawCell(context, colour, x, y, this.size, snapshot.cells[block], snapshot.written.has(block));
    }
    context.globalAlpha = 1;
    if (chosen && this.size >= 8) this.link(context, colour, chosen.blocks);
    this.canvas.setAttribute(
      "aria-label",
      `${this.count} blocks: ${snapshot.count.held} held, ${snapshot.count.shared} of them shared, ` +
        `${snapshot.count.cached} cached, ${snapshot.count.free} free`,
    );
  }

  // The largest cells of which all fit.
  layOut(width, height) {
    let size = Math.min(LARGEST, Math.max(2, Math.floor(Math.sqrt((width * height) / this.count))));
    while (size > 2 && Math.ceil(this.count / Math.floor(width / size)) * size > height) size -= 1;
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
  }

  // The block table: a line from block to block, in the order of the tokens.
  link(context, colour, blocks) {
    const half = (this.size - 2) / 2;
    const centre = (block) => [
      (block % this.columns) * this.size + half,
      Math.floor(block / this.columns) * this.size + half,
    ];
    context.strokeStyle = colour.mark;
    context.lineWidth = 1.5;
    context.globalAlpha = 0.65;
    context.beginPath();
    blocks.forEach((block, place) => {
      const [x, y] = centre(block);
      if (place) context.lineTo(x, y);
      else context.moveTo(x, y);
    });
    context.stroke();
    context.globalAlpha = 1;
    if (blocks.length) {
      const [x, y] = centre(blocks[0]);
      context.fillStyle = colour.mark;
      context.beginPath();
      context.arc(x, y, Math.max(3, this.size / 6), 0, 2 * Math.PI);
      context.fill();
    }
  }
}
