"use strict";
// Draws the step-time heat map: one row a rank, one column a range of steps, coloured by how long a
// step took compared to the median of all ranks in that column.
(() => {
  const heat = JSON.parse(document.getElementById("heat-data").textContent);
  const canvas = document.getElementById("heat");
  if (!heat || !canvas) return;
  const rows = heat.cells.length, columns = heat.medians.length;
  const rowHeight = Math.max(1, Math.min(18, Math.floor(640 / rows)));
  canvas.width = columns;
  canvas.height = rows;
  canvas.style.height = `${rows * rowHeight}px`;
  const overall = heat.medians.filter((m) => m !== null).sort((a, b) => a - b);
  const typical = overall[Math.floor(overall.length / 2)];

  // 1 is the reference; 1.5 times and more is the darkest red, 2/3 and less the darkest blue.
  function colour(ratio) {
    const t = Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(1.5)));
    const far = t > 0 ? [192, 57, 43] : [44, 95, 158];
    return [238, 240, 242].map((near, i) => Math.round(near + (far[i] - near) * Math.abs(t)));
  }

  function paint(byRank) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    let painted = 0;
    heat.cells.forEach((row, y) => row.forEach((seconds, x) => {
      if (seconds === null) return;
      const reference = byRank ? heat.medians[x] : typical;
      image.data.set([...colour(seconds / reference), 255], 4 * (y * columns + x));
      painted += 1;
    }));
    context.putImageData(image, 0, 0);
    canvas.dataset.painted = String(painted);
  }

  const seconds = (s) => (s < 1 ? `${(s * 1000).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
  const tip = document.getElementById("heat-tip");
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns));
    const y = Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows));
    if (x < 0 || y < 0) return;
    const from = heat.first_step + x * heat.width, to = from + heat.width - 1;
    const where = `rank ${heat.ranks[y]}, ${to > from ? `steps ${from} to ${to}` : `step ${from}`}`;
    const cell = heat.cells[y][x];
    tip.textContent = cell === null ? `${where}: not timed`
      : `${where}: ${seconds(cell)}, ${(cell / heat.medians[x]).toFixed(2)} times the median of the ranks`;
  });
  document.getElementById("heat-mode").addEventListener("change", (event) => paint(event.target.value === "ranks"));
  paint(true);
})();
