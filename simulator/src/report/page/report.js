// SPDX-License-Identifier: Apache-2.0
const rowHeight = 26, rowGap = 5, axis = 22;
const left = data.plans[0].pair ? 196 : 132;  // of the rows' names
const groups = ['forward', 'backward', 'optimizer', 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', 'send_recv', 'other_collective', 'copy', 'wait', 'host', 'trigger'];
const groupNames = {forward: 'forward compute', backward: 'backward compute', optimizer: 'optimizer', copy: 'copies and casts',
  wait: 'stream waits', host: 'host issues', trigger: 'triggers'};
let plan = data.plans[0], view = [0, 1];
let sought = '', found = [], shownMatch = -1;  // what is searched for, the spans that have it, the one that is shown

function time(ns) {
  const size = Math.abs(ns);
  const four = (value) => value.toFixed(Math.max(0, Math.min(3, 3 - Math.floor(Math.log10(Math.abs(value))))));
  if (size >= 1e9) return four(ns / 1e9) + ' s';
  if (size >= 1e6) return four(ns / 1e6) + ' ms';
  if (size >= 1e3) return four(ns / 1e3) + ' µs';
  return Math.round(ns) + ' ns';
}
function size(bytes) {
  if (bytes >= 2 ** 30) return (bytes / 2 ** 30).toFixed(2) + ' GiB';
  if (bytes >= 2 ** 20) return (bytes / 2 ** 20).toFixed(1) + ' MiB';
  return (bytes / 1024).toFixed(1) + ' KiB';
}
const percent = (part) => (100 * part).toFixed(1) + ' %';
const element = (tag, text, name) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
};

// The step when each figure of the cluster is better and worse by what it may be off, the widest first.
function tornado(r) {
  $('tornadobox').hidden = r.figures.length === 0;
  $('interval').textContent = `${time(r.low)} to ${time(r.high)} two times in three. Bars: the step when a figure is better, and worse, by what it may be off.`;
  const ends = r.figures.flatMap((f) => [f[3], f[4]]).concat(r.step);
  const least = Math.min(...ends), span = Math.max(1, Math.max(...ends) - least);
  const place = (t) => 100 * (t - least) / span;
  $('tornado').innerHTML = r.figures.map((f) => {
    const from = place(Math.min(f[3], f[4])), to = place(Math.max(f[3], f[4]));
    return `<span>${escape(f[0])} (${escape(f[1])}, ${(f[2] / 1e4).toFixed(0)} %)</span><span class="bar"><b style="left:${from}%;width:${to - from}%"></b>` +
      `<i style="left:${place(r.step)}%"></i></span><span>${time(f[3])} to ${time(f[4])}</span>`;
  }).join('');
}

function table(target, heads, rows, textColumns) {
  const made = element('table'), head = made.createTHead().insertRow(), body = made.createTBody();
  heads.forEach((text, i) => head.append(element('th', text, textColumns.includes(i) ? 'text' : '')));
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text, i) => line.append(element('td', text, textColumns.includes(i) ? 'text' : '')));
  }
  $(target).replaceChildren(made);
}

function comparison() {
  const made = element('table'), head = made.createTHead().insertRow(), body = made.createTBody();
  head.append(element('th', ''));
  data.comparison.titles.forEach((title) => head.append(element('th', title)));
  for (const row of data.comparison.rows) {
    const line = body.insertRow();
    if (row.heading) line.className = 'group';
    line.append(element('td', row.label, row.indented ? 'in' : ''));
    row.cells.forEach((text) => line.append(element('td', text)));
    if (row.heading) data.comparison.titles.forEach(() => line.append(element('td', '')));
  }
  $('comparison').replaceChildren(made);
}

function cards() {
  const r = plan.report, out = [];
  const card = (name, value, more, bad, gauge) => {
    const made = element('div', undefined, 'card');
    made.append(element('div', name, 'name'), element('div', value, 'value'));
    if (gauge !== undefined) {
      const bar = element('div', undefined, 'gauge'), fill = element('i', undefined, bad ? 'bad' : '');
      fill.style.width = Math.min(100, 100 * gauge) + '%';
      bar.append(fill);
      made.append(bar);
    }
    made.append(element('div', more, bad ? 'more bad' : 'more'));
    out.push(made);
  };
  if (plan.pair) {
    for (const [name, value, more] of plan.pair.cards) card(name, value, more);
    $('cards').replaceChildren(...out);
    return;
  }
  const needed = r.needed;
  card('step', time(r.step), 'forward ' + time(r.forward) + ', backward ' + time(r.backward));
  card('tokens/s per GPU', r.tokens.toLocaleString('en-US'), data.ranks + ' ranks');
  card('model FLOPs utilization', percent(r.mfu / 1e6), 'compute busy ' + percent(r.compute / r.step));
  card('exposed communication', time(r.exposed), percent(r.exposed / r.step) + ' of the step');
  card('overlap', percent(r.overlap / 1e6), time(r.communication) + ' of communication');
  if (r.peak) card('peak memory', size(r.peak), r.device ? (r.fits ? '' : 'does not fit: ') + size(needed) + ' of ' + size(r.device) +
    ' reserved, with context and NCCL' + (r.fits && r.releases ? ', ' + r.releases + ' cache releases' : '') : 'allocated', !r.fits, r.device ? needed / r.device : undefined);
  $('cards').replaceChildren(...out);
}

// A measured step beside the predicted one.
function pairDetails() {
  const pair = plan.pair, off = (p, m) => p > 0 ? (m >= p ? '+' : '−') + percent(Math.abs(m - p) / p) : '';
  const both = (rows) => rows.map(([what, p, m]) => [what, time(p), time(m), (m < p ? '−' : '+') + time(Math.abs(m - p)), off(p, m)]);
  const heads = ['', 'predicted', 'measured', 'difference', ''];
  table('activities', heads, both(pair.activities), [0]);
  table('kernels', ['', 'pass', 'predicted', 'measured', 'kernels', 'difference', ''], pair.kernels.map(([kind, phase, pc, mc, p, m]) =>
    [kind, phase, time(p), time(m), pc + ' / ' + mc, (m < p ? '−' : '+') + time(Math.abs(m - p)), off(p, m)]), [0, 1]);
  table('collectives', ['collective', 'communicator', 'calls', 'predicted', 'measured', 'exposed, predicted', 'exposed, measured', ''],
    pair.collectives.map(([kind, group, pc, mc, p, m, pe, me]) => [kind, group, pc + ' / ' + mc, time(p), time(m), time(pe), time(me), off(p, m)]), [0, 1]);
  table('units', heads, both(pair.units), [0]);
  table('streams', ['memory', 'predicted', 'measured'], pair.memory.map(([what, p, m]) => [what, size(p), size(m)]), [0]);
  $('notes').replaceChildren(...pair.remarks.map((n) => element('li', n)));
  $('tornadobox').hidden = true;
  $('legend').replaceChildren(...groups.filter((g) => plan.used.has(g)).map((g) => swatch(color(g), groupNames[g] || g)));
}
function details() {
  for (const id of ['activitiesbox', 'kernelsbox']) $(id).hidden = !plan.pair;
  $('streamshead').textContent = plan.pair ? 'Memory at the peak' : 'Streams';
  if (plan.pair) {
    pairDetails();
    return;
  }
  const r = plan.report;
  table('collectives', ['collective', 'communicator', 'calls', 'bytes', 'busy', 'exposed', 'cost from'],
    r.collectives.map((c) => [c[0], c[1], String(c[2]), size(c[3]), time(c[4]), time(c[5]), c[6]]), [0, 1, 6]);
  table('units', ['unit', 'parameters', 'forward', 'backward', 'waited for'],
    r.units.map((u) => [u[0], size(u[1]), time(u[2]), time(u[3]), time(u[4])]), [0]);
  table('streams', ['stream', 'operations', 'busy', 'of the step'],
    r.streams.map((s) => [s[0], String(s[2]), time(s[1]), percent(s[1] / r.step)]), [0]);
  tornado(r);
  $('notes').replaceChildren(...r.notes.map((n) => element('li', n)));
  $('peak').textContent = 'Allocated bytes by category, where the compute stream passes each allocation. Peak ' +
    size(r.peak) + ' at ' + r.peakAt + '.';
  $('legend').replaceChildren(...groups.filter((g) => plan.used.has(g)).map((g) => swatch(color(g), groupNames[g] || g)));
  $('memorylegend').replaceChildren(...plan.shown.slice().reverse().map((c) => categorySwatch(plan.categories[c])));
}
function swatch(hue, text) {
  const made = element('span'), box = element('i');
  box.style.background = hue;
  made.append(box, text);
  return made;
}

// ---- preparation: spans by row, memory as a stack ----
function prepare(p) {
  p.rows = p.rows.map((name) => ({name, spans: []}));
  p.used = new Set();
  p.length = Math.max(1, p.length || p.report.step);
  const s = p.spans;
  for (let i = 0; i < s.length; i += 6) {
    const span = {row: s[i], start: s[i + 1], end: s[i + 1] + s[i + 2], text: p.texts[s[i + 3]], group: groups[s[i + 4]],
      more: p.texts[s[i + 5]]};
    p.used.add(span.group);
    p.rows[span.row].spans.push(span);
  }
  for (const row of p.rows) row.spans.sort((a, b) => a.start - b.start);
  const most = p.categories.map((_, c) => Math.max(0, ...[0].concat(columnMaximum(p, c))));
  p.shown = p.categories.map((_, c) => c).filter((c) => most[c] > 0);
  // Steady categories at the bottom, the ones that come and go on top.
  const least = p.categories.map((_, c) => columnMinimum(p, c));
  p.shown.sort((a, b) => least[b] - least[a] || most[b] - most[a]);
  p.total = p.memory.map((m) => m.slice(1).reduce((a, b) => a + b, 0));
  p.top = p.total.reduce((a, b) => Math.max(a, b), 1);
}
const columnMaximum = (p, c) => p.memory.reduce((a, m) => Math.max(a, m[c + 1]), 0);
const columnMinimum = (p, c) => p.memory.reduce((a, m) => Math.min(a, m[c + 1]), Infinity);

// ---- drawing ----
function surface(id, height) {
  const {c, width} = scaledCanvas(id, height);
  return {c, width, height, x: (t) => left + (t - view[0]) / (view[1] - view[0]) * (width - left)};
}
function ticks(s, y) {
  const span = view[1] - view[0], rough = span / Math.max(2, (s.width - left) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((v) => v >= rough);
  s.c.textAlign = 'center';
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
    const x = s.x(t);
    s.c.fillStyle = color('line');
    s.c.fillRect(x, 0, 1, y);
    s.c.fillStyle = color('soft');
    const digits = Math.max(0, Math.min(4, 6 - Math.floor(Math.log10(step))));
    if (x > left + 12 && x < s.width - 30) s.c.fillText((t / 1e6).toFixed(digits) + ' ms', x, y + axis / 2 + 2);
  }
}
function firstVisible(spans) {
  let low = 0, high = spans.length;  // ends grow with starts: the spans of a row do not overlap
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end < view[0]) low = middle + 1; else high = middle;
  }
  return low;
}
function drawTimeline() {
  const bottom = plan.rows.length * (rowHeight + rowGap), s = surface('timeline', bottom + axis), c = s.c;
  ticks(s, bottom);
  const hues = Object.fromEntries(groups.map((g) => [g, color(g)]));
  plan.rows.forEach((row, r) => {
    const y = r * (rowHeight + rowGap);
    let painted = -1, paintedHue = '';
    for (let i = firstVisible(row.spans); i < row.spans.length && row.spans[i].start <= view[1]; ++i) {
      const span = row.spans[i], from = Math.max(left, s.x(span.start)), to = Math.min(s.width, s.x(span.end));
      const hue = hues[span.group], faint = sought && !has(span);
      if (to - from < 1 && Math.floor(from) === painted && hue === paintedHue && !(sought && !faint)) continue;
      painted = Math.floor(from);
      paintedHue = hue;
      c.fillStyle = hue;
      const gap = to - from > 4 ? 1 : 0, thin = span.group === 'wait' ? 9 : 2;
      c.globalAlpha = faint ? 0.15 : 1;
      c.fillRect(from, y + thin, Math.max(1, to - from - gap), rowHeight - 2 * thin);
      if (span === found[shownMatch]) {
        c.strokeStyle = color('ink');
        c.lineWidth = 2;
        c.strokeRect(from, y + 1, Math.max(2, to - from - gap), rowHeight - 2);
      }
      if (to - from > 46 && span.group !== 'wait') {
        c.save();
        c.beginPath();
        c.rect(from, y, to - from - 4, rowHeight);
        c.clip();
        c.fillStyle = inkOn(hue);
        c.textAlign = 'left';
        c.fillText(span.text, from + 6, y + rowHeight / 2 + 1);
        c.restore();
      }
    }
    c.globalAlpha = 1;
    c.fillStyle = color('card');
    c.fillRect(0, y, left - 1, rowHeight + rowGap);
    c.fillStyle = color('soft');
    c.textAlign = 'left';
    c.fillText(row.name, 0, y + rowHeight / 2 + 1);
    c.fillStyle = color('line');
    c.fillRect(0, y + rowHeight + 2, s.width, 1);
  });
}
function drawMemory(at) {
  const height = 250, bottom = height - axis, s = surface('memory', height), c = s.c, device = plan.report.device;
  const room = device ? device - (plan.report.needed - plan.report.reserved) : 0;
  const top = Math.max(plan.top, room && room < 1.6 * plan.top ? room : 0) * 1.06;
  const y = (bytes) => bottom - bytes / top * (bottom - 6);
  ticks(s, bottom);
  c.textAlign = 'right';
  const unit = top > 2 ** 33 ? 2 ** 30 : top > 2 ** 23 ? 2 ** 20 : 2 ** 10;
  const rough = top / unit / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= rough) * unit;
  for (let b = step; b < top; b += step) {
    c.fillStyle = color('line');
    c.fillRect(left, y(b), s.width - left, 1);
    c.fillStyle = color('soft');
    c.fillText(size(b), left - 8, Math.min(bottom - 6, y(b)));
  }
  const points = plan.memory, base = new Float64Array(points.length);
  c.save();
  c.beginPath();
  c.rect(left, 0, s.width - left, bottom);
  c.clip();
  for (const category of plan.shown) {
    c.beginPath();
    for (let i = 0; i < points.length; ++i) {
      const x = s.x(points[i][0]), value = y(base[i] + points[i][category + 1]);
      if (i > 0) c.lineTo(x, y(base[i - 1] + points[i - 1][category + 1]));
      c.lineTo(x, value);
    }
    const last = points.length - 1;
    c.lineTo(s.x(plan.report.step), y(base[last] + points[last][category + 1]));
    c.lineTo(s.x(plan.report.step), y(base[last]));
    for (let i = last; i >= 0; --i) {
      c.lineTo(s.x(points[i][0]), y(base[i]));
      if (i > 0) c.lineTo(s.x(points[i][0]), y(base[i - 1]));
    }
    c.closePath();
    c.fillStyle = paint(c, plan.categories[category]);
    c.fill();
    for (let i = 0; i < points.length; ++i) base[i] += points[i][category + 1];
  }
  if (room && room < top) {
    c.fillStyle = color('bad');
    c.fillRect(left, y(room), s.width - left, 1.5);
    c.textAlign = 'left';
    c.fillText('device memory without context and NCCL', left + 8, y(room) + 9);
  }
  if (at !== undefined) {
    c.fillStyle = color('ink');
    c.fillRect(s.x(at), 0, 1, bottom);
  }
  c.restore();
}
let scheduled = false;
function draw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    drawTimeline();
    if (plan.memory.length > 0) drawMemory();
  });
}

// ---- interaction ----
function tip(event, html) {
  const box = $('tip');
  if (!html) { box.style.display = 'none'; return; }
  box.innerHTML = html;
  box.style.display = 'block';
  box.style.left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8) + 'px';
  box.style.top = Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8) + 'px';
}
function zoom(factor, around) {
  const span = Math.min(plan.length, Math.max(200, (view[1] - view[0]) * factor));
  const part = (around - view[0]) / (view[1] - view[0]);
  move(around - part * span, span);
}
function move(start, span) {
  start = Math.max(0, Math.min(plan.length - span, start));
  view = [start, start + span];
  draw();
}
const timeAt = (event, canvas) => {
  const box = canvas.getBoundingClientRect();
  return view[0] + (event.clientX - box.left - left) / (box.width - left) * (view[1] - view[0]);
};
for (const id of ['timeline', 'memory']) {
  const canvas = $(id);
  let drag = null;
  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(view[0] + (event.deltaX || event.deltaY) / canvas.clientWidth * (view[1] - view[0]), view[1] - view[0]);
    } else {
      zoom(Math.exp(event.deltaY * 0.0015), timeAt(event, canvas));
    }
  }, {passive: false});
  canvas.addEventListener('pointerdown', (event) => {
    drag = {x: event.clientX, start: view[0]};
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add('drag');
  });
  canvas.addEventListener('pointerup', () => { drag = null; canvas.classList.remove('drag'); });
  canvas.addEventListener('dblclick', () => move(0, plan.length));
  canvas.addEventListener('pointerleave', () => { tip(); if (id === 'memory') draw(); });
  canvas.addEventListener('pointermove', (event) => {
    if (drag) {
      const span = view[1] - view[0];
      move(drag.start - (event.clientX - drag.x) / (canvas.clientWidth - left) * span, span);
      tip();
    } else if (id === 'timeline') {
      hoverSpan(event, canvas);
    } else {
      hoverMemory(event, canvas);
    }
  });
}
function hoverSpan(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const row = plan.rows[Math.floor((event.clientY - box.top) / (rowHeight + rowGap))];
  if (!row || event.clientX - box.left < left) { tip(event); return; }
  const now = timeAt(event, canvas), slack = 3 * (view[1] - view[0]) / (box.width - left);
  let best = null, distance = slack;
  for (let i = firstVisible(row.spans); i < row.spans.length && row.spans[i].start <= now + slack; ++i) {
    const span = row.spans[i], away = Math.max(0, span.start - now, now - span.end);
    if (away <= distance) { best = span; distance = away; }
  }
  if (!best) { tip(event); return; }
  tip(event, '<b>' + escape(best.text) + '</b><br>' + time(best.end - best.start) + ', from ' + time(best.start) + ' to ' +
    time(best.end) + (best.more ? '<br>' + escape(best.more) : ''));
}
function hoverMemory(event, canvas) {
  const now = Math.max(0, timeAt(event, canvas));
  if (event.clientX - canvas.getBoundingClientRect().left < left || !plan.memory.length) { tip(event); return; }
  let low = 0, high = plan.memory.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (plan.memory[middle][0] <= now) low = middle; else high = middle - 1;
  }
  const point = plan.memory[low];
  const rows = plan.shown.filter((c) => point[c + 1] > 0).sort((a, b) => point[b + 1] - point[a + 1])
    .map((c) => categoryRow(plan.categories[c], size(point[c + 1])));
  drawMemory(now);
  tip(event, '<b>' + size(plan.total[low]) + '</b> at ' + time(point[0]) + '<table>' + rows.join('') + '</table>');
}
// ---- search: units, operators, buffers by their names ----
const has = (span) => (span.text + ' ' + (span.more || '')).toLowerCase().includes(sought);
function search(text) {
  sought = text.trim().toLowerCase();
  found = sought ? plan.rows.flatMap((row) => row.spans.filter(has)).sort((a, b) => a.start - b.start) : [];
  shownMatch = -1;
  tellFound();
  draw();
}
function tellFound() {
  $('found').textContent = !sought ? '' : found.length === 0 ? 'none' : shownMatch < 0 ? found.length + ' found' : shownMatch + 1 + ' of ' + found.length;
}
function showMatch(step) {
  if (!found.length) return;
  shownMatch = shownMatch < 0 ? (step > 0 ? 0 : found.length - 1) : (shownMatch + step + found.length) % found.length;
  const span = found[shownMatch], wide = Math.min(view[1] - view[0], Math.max(plan.length / 20, 4 * (span.end - span.start)));
  move((span.start + span.end) / 2 - wide / 2, wide);
  tellFound();
}
$('search').addEventListener('input', () => search($('search').value));
$('search').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') showMatch(event.shiftKey ? -1 : 1);
  if (event.key === 'Escape') { $('search').value = ''; search(''); $('search').blur(); }
});
const zoomInto = (factor) => zoom(factor, (view[0] + view[1]) / 2);
keyboard(() => view, () => [0, plan.length], move, zoomInto, {'/': () => $('search').focus(), n: () => showMatch(1), N: () => showMatch(-1)});
$('in').onclick = () => zoomInto(0.5);
$('out').onclick = () => zoomInto(2);
$('all').onclick = () => move(0, plan.length);
window.addEventListener('resize', draw);
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { details(); draw(); });

function select(index) {
  plan = data.plans[index];
  view = [0, plan.length];
  [...$('tabs').children].forEach((button, i) => button.setAttribute('aria-pressed', String(i === index)));
  $('timelinebox').hidden = plan.spans.length === 0;
  $('memorybox').hidden = plan.memory.length === 0;
  search($('search').value);
  cards();
  details();
  draw();
}
data.plans.forEach((p, i) => {
  prepare(p);
  const button = element('button', p.title);
  button.onclick = () => select(i);
  $('tabs').append(button);
});
$('tabs').hidden = data.plans.length < 2;
comparison();
if (plan.pair) $('comparisonbox').before($('timelinebox'));
select(0);
