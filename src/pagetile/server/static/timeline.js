// Three small charts over the last 60 seconds: blocks, sequences, tokens per second.

const SECONDS = 60;
const LABELS = 92; // pixels on the left

export class Timeline {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.frames = [];
    const pick = (event) => {
      const index = this.indexAt(event.offsetX);
      if (index !== null) onPick(index);
    };
    canvas.addEventListener("click", pick);
    canvas.addEventListener("mousemove", (event) => event.buttons === 1 && pick(event));
  }

  indexAt(x) {
    if (!this.frames.length) return null;
    const end = this.frames[this.frames.length - 1].time;
    const width = this.canvas.clientWidth - LABELS;
    const time = end - SECONDS * (1 - (x - LABELS) / width);
    let best = 0;
    this.frames.forEach((frame, index) => {
      if (Math.abs(frame.time - time) < Math.abs(this.frames[best].time - time)) best = index;
    });
    return best;
  }

  show(frames, shown) {
    this.frames = frames;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !frames.length) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const end = frames[frames.length - 1].time;
    const x = (frame) => LABELS + (width - LABELS) * (1 - (end - frame.time) / SECONDS);
    const gap = 8;
    const band = (height - 2 * gap) / 3;

    const chart = (row, name, most, series) => {
      const top = row * (band + gap);
      const y = (value) => top + band - (band * Math.min(value, most)) / most;
      context.fillStyle = colour("card");
      context.fillRect(LABELS, top, width - LABELS, band);
      for (const [value, fill] of series) {
        context.beginPath();
        context.moveTo(x(frames[0]), top + band);
        for (const frame of frames) context.lineTo(x(frame), y(value(frame)));
        context.lineTo(x(frames[frames.length - 1]), top + band);
        context.closePath();
        context.fillStyle = colour(fill);
        context.fill();
      }
      context.fillStyle = colour("quiet");
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "top";
      context.textAlign = "left";
      context.fillText(name, 0, top + 2);
      context.textBaseline = "bottom";
      context.fillText(`0–${Math.round(most).toLocaleString()}`, 0, top + band);
    };

    const highest = (value) => Math.max(1, ...frames.map(value));
    chart(0, "blocks", frames[0].num_blocks, [
      [(f) => f.count.held + f.count.cached, "cached"],
      [(f) => f.count.held, "held"],
      [(f) => f.count.shared, "shared"],
    ]);
    const sequences = (f) => f.sequences.length + f.waiting;
    chart(1, "sequences", highest(sequences), [
      [sequences, "free"],
      [(f) => f.sequences.length, "chart-seqs"],
    ]);
    chart(2, "tokens/s", highest((f) => f.tokens_per_second), [[(f) => f.tokens_per_second, "chart-tokens"]]);

    const at = x(frames[Math.max(0, shown)]);
    context.strokeStyle = colour("mark");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, height);
    context.stroke();
  }
}
