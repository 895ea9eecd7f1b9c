// SPDX-License-Identifier: Apache-2.0
// data: categories, labels, units, marks [[action, text index]...], begin, end (actions), peak (action), blocks
// [bytes, category, unit, label, born, died, address, size]..., segments [address, bytes, from, to]...
const left = 92, axis = 24;
let view = [data.begin, data.end];

function size(bytes) {
  if (bytes >= 2 ** 30) return (bytes / 2 ** 30).toFixed(3) + ' GiB';
  if (bytes >= 2 ** 20) return (bytes / 2 ** 20).toFixed(2) + ' MiB';
  return (bytes / 1024).toFixed(1) + ' KiB';
}
const blocks = data.blocks.map((b) => ({bytes: b[0], category: b[1], unit: b[2], label: data.labels[b[3]], born: b[4],
  died: b[5] < 0 ? Infinity : b[5], address: b[6], size: b[7]}));

// ---- the stack: bytes by category after every action ----
const used = [...new Set(blocks.map((b) => b.category))];
const lowest = {}, highest = {};
const series = (() => {
  const changes = [];
  for (const b of blocks) {
    changes.push([b.born, b.category, b.bytes]);
    if (b.died !== Infinity) changes.push([b.died, b.category, -b.bytes]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  const now = {}, points = [];
  let total = 0;
  used.forEach((c) => { now[c] = 0; });
  for (let i = 0; i < changes.length;) {
    const at = changes[i][0];
    for (; i < changes.length && changes[i][0] === at; ++i) {
      now[changes[i][1]] += changes[i][2];
      total += changes[i][2];
    }
    if (at > data.end) break;
    const point = {at: Math.max(at, data.begin), total, by: {...now}};
    if (points.length && points[points.length - 1].at === point.at) points.pop();
    points.push(point);
  }
  for (const point of points) {
    for (const c of used) {
      lowest[c] = Math.min(lowest[c] ?? Infinity, point.by[c]);
      highest[c] = Math.max(highest[c] ?? 0, point.by[c]);
    }
  }
  return points;
})();
// Steady categories at the bottom, the ones that come and go on top.
const shown = used.filter((c) => highest[c] > 0).sort((a, b) => lowest[b] - lowest[a] || highest[b] - highest[a]);
const top_ = series.reduce((a, p) => Math.max(a, p.total), 1);

function surface(id, height) {
  const {c, width} = scaledCanvas(id, height);
  return {c, width, height, x: (at) => left + (at - view[0]) / Math.max(1, view[1] - view[0]) * (width - left)};
}
function marks(s, bottom) {
  let free = left;
  s.c.textAlign = 'left';
  for (const [at, text] of data.marks) {
    const x = s.x(at);
    if (x < free || x > s.width - 40) continue;
    const words = data.labels[text];
    s.c.fillStyle = color('line');
    s.c.fillRect(x, 0, 1, bottom + 5);
    s.c.fillStyle = color('soft');
    s.c.fillText(words, x + 3, bottom + axis / 2 + 3);
    free = x + s.c.measureText(words).width + 14;
  }
}
function scale(s, bottom, most, y) {
  const step = 2 ** Math.ceil(Math.log2(most / 6));
  s.c.textAlign = 'right';
  for (let value = 0; value <= most; value += step) {
    s.c.fillStyle = color('line');
    s.c.fillRect(left, y(value), s.width - left, 1);
    s.c.fillStyle = color('soft');
    s.c.fillText(size(value), left - 8, y(value));
  }
}

function drawPlot() {
  const height = 420, bottom = height - axis, s = surface('plot', height), c = s.c;
  const y = (bytes) => bottom - bytes / (top_ * 1.04) * (bottom - 6);
  scale(s, bottom, top_ * 1.04, y);
  // The fullest point of each column of pixels.
  const columns = new Map();
  let before = null;
  for (const point of series) {
    if (point.at < view[0]) { before = point; continue; }
    if (point.at > view[1]) break;
    const x = Math.floor(s.x(point.at));
    const found = columns.get(x);
    if (!found || found.total < point.total) columns.set(x, point);
  }
  const list = [...columns.entries()].sort((a, b) => a[0] - b[0]);
  if (before) list.unshift([left, before]);
  if (list.length) list.push([s.width, list[list.length - 1][1]]);
  const base = new Float64Array(list.length);
  for (const category of shown) {
    c.fillStyle = paint(c, data.categories[category]);
    c.beginPath();
    list.forEach(([x, point], i) => {
      if (i > 0) c.lineTo(x, y(base[i - 1] + list[i - 1][1].by[category]));
      c[i ? 'lineTo' : 'moveTo'](x, y(base[i] + point.by[category]));
    });
    for (let i = list.length - 1; i >= 0; --i) {
      c.lineTo(list[i][0], y(base[i]));
      if (i > 0) c.lineTo(list[i][0], y(base[i - 1]));
    }
    c.fill();
    list.forEach(([, point], i) => { base[i] += point.by[category]; });
  }
  marks(s, bottom);
  const x = s.x(data.peak);
  if (x >= left && x <= s.width) {
    c.fillStyle = color('bad');
    c.fillRect(x, 0, 1, bottom);
  }
}

// ---- addresses over the step: rectangles, one per block ----
const rows = (() => {
  const made = [];
  let y = 0;
  for (const [address, bytes, from, to] of data.segments) {
    made.push({address, bytes, from, to: to < 0 ? Infinity : to, y});
    y += bytes;
  }
  made.total = y;
  return made;
})();
function place(address) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].address <= address) low = middle; else high = middle - 1;
  }
  return rows.length ? rows[low].y + address - rows[low].address : 0;
}
function drawMap() {
  if (!rows.length) return;
  const height = 560, bottom = height - axis, s = surface('map', height), c = s.c;
  const y = (bytes) => bottom - bytes / rows.total * (bottom - 6);
  scale(s, bottom, rows.total, y);
  c.fillStyle = color('hover');
  for (const r of rows) {
    const from = Math.max(left, s.x(r.from)), to = Math.min(s.width, s.x(Math.min(r.to, view[1])));
    if (to > from) c.fillRect(from, y(r.y + r.bytes), to - from, y(r.y) - y(r.y + r.bytes));
  }
  const paints = {};
  for (const category of shown) paints[category] = paint(c, data.categories[category]);
  for (const b of blocks) {
    if (!b.size || b.died < view[0] || b.born > view[1]) continue;
    const from = Math.max(left, s.x(b.born)), to = Math.min(s.width, s.x(Math.min(b.died, view[1])));
    const low = place(b.address), tall = y(low) - y(low + b.bytes);
    if (tall < 0.3) continue;
    c.fillStyle = paints[b.category];
    c.fillRect(from, y(low + b.bytes), Math.max(1, to - from), Math.max(1, tall - (tall > 4 ? 0.5 : 0)));
  }
  c.fillStyle = color('line');
  for (const r of rows) c.fillRect(left, y(r.y), s.width - left, 0.5);
  marks(s, bottom);
}

function draw() {
  drawPlot();
  if (!$('mapbox').hidden) drawMap();
}

// ---- hovering, zooming ----
function tip(event, html) {
  const box = $('tip');
  box.style.display = html ? 'block' : 'none';
  if (!html) return;
  box.innerHTML = html;
  box.style.left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8) + 'px';
  box.style.top = Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8) + 'px';
}
const describe = (b) => '<b>' + escape(b.label || data.categories[b.category]) + '</b><br>' +
  escape((b.unit >= 0 ? data.units[b.unit] : 'no unit') + ', ' + data.categories[b.category]) + '<br>' + size(b.bytes);
const when = (at) => {
  let text = '';
  for (const [a, t] of data.marks) { if (a > at) break; text = data.labels[t]; }
  return text;
};
function position(event, canvas) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
  return {x, y: event.clientY - box.top, at: view[0] + (x - left) / (box.width - left) * (view[1] - view[0])};
}
function hoverPlot(event) {
  const p = position(event, $('plot')), at = Math.floor(p.at), bottom = 420 - axis;
  if (p.x < left || p.y > bottom) { tip(event); return; }
  let point = series[0];
  for (const candidate of series) { if (candidate.at > at) break; point = candidate; }
  if (!point) return;
  const pointed = (bottom - p.y) / (bottom - 6) * top_ * 1.04;
  let sum = 0, category = -1;
  for (const c of shown) {
    sum += point.by[c];
    if (pointed <= sum) { category = c; break; }
  }
  const alive = blocks.filter((b) => b.born <= point.at && b.died > point.at && (category < 0 || b.category === category))
    .sort((a, b) => b.bytes - a.bytes);
  const lines = alive.slice(0, 8).map((b) => '<tr><td class="text">' + escape(b.label) + '</td><td class="text">' +
    escape(b.unit >= 0 ? data.units[b.unit] : '') + '</td><td>' + size(b.bytes) + '</td></tr>').join('');
  tip(event, '<b>' + escape(when(point.at)) + '</b><br>' + size(point.total) + ' allocated<br>' +
    (category < 0 ? '' : '<b>' + escape(data.categories[category]) + '</b> ' + size(point.by[category]) + '<br>' + escape(look(data.categories[category]).says)) +
    '<table>' + lines + '</table>' + (alive.length > 8 ? alive.length - 8 + ' more' : ''));
}
function hoverMap(event) {
  const p = position(event, $('map')), bottom = 560 - axis;
  if (p.x < left || p.y > bottom) { tip(event); return; }
  const pointed = (bottom - p.y) / (bottom - 6) * rows.total;
  const slack = (view[1] - view[0]) / 1000;
  const found = blocks.find((b) => {
    if (!b.size || b.born > p.at + slack || b.died < p.at) return false;
    const low = place(b.address);
    return pointed >= low && pointed < low + Math.max(b.bytes, rows.total / bottom);
  });
  tip(event, found ? describe(found) + '<br>from ' + escape(when(found.born)) : '');
}
for (const id of ['plot', 'map']) {
  const canvas = $(id);
  let drag = null;
  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    const at = position(event, canvas).at, factor = event.deltaY > 0 ? 1.25 : 0.8;
    view = [Math.max(data.begin, at - (at - view[0]) * factor), Math.min(data.end, at + (view[1] - at) * factor)];
    if (view[1] - view[0] < 4) view[1] = view[0] + 4;
    draw();
  }, {passive: false});
  canvas.addEventListener('pointerdown', (event) => { drag = {x: event.clientX, view}; });
  window.addEventListener('pointerup', () => { drag = null; });
  canvas.addEventListener('pointermove', (event) => {
    if (drag) {
      const width = drag.view[1] - drag.view[0];
      const moved = (drag.x - event.clientX) / (canvas.clientWidth - left) * width;
      const begin = Math.max(data.begin, Math.min(data.end - width, drag.view[0] + moved));
      view = [begin, begin + width];
      draw();
    } else if (id === 'plot') hoverPlot(event); else hoverMap(event);
  });
  canvas.addEventListener('pointerleave', (event) => tip(event));
  canvas.addEventListener('dblclick', () => { view = [data.begin, data.end]; draw(); });
}
const legend = () => $('legend').replaceChildren(...shown.slice().reverse().map((c) => categorySwatch(data.categories[c])));
legend();
// ---- keyboard ----
function show(begin, span) {
  const from = Math.max(data.begin, Math.min(data.end - span, begin));
  view = [from, from + span];
  draw();
}
function zoomInto(factor) {
  const wide = Math.min(data.end - data.begin, Math.max(4, (view[1] - view[0]) * factor));
  show((view[0] + view[1] - wide) / 2, wide);
}
keyboard(() => view, () => [data.begin, data.end], show, zoomInto);
$('mapbox').hidden = rows.length === 0;
window.addEventListener('resize', draw);
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { legend(); draw(); });
draw();
