// SPDX-License-Identifier: Apache-2.0
'use strict';
// What the pages share. Each page's script follows it.
const data = JSON.parse(document.getElementById('data').textContent);
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
// Of a category of memory: its colour, whether it is hatched, and what it is (categories.json). A family has a hue, which differs from the others' without colour vision, too.
function look(category) {
  const [family, shade, hatched, says] = palette[category] || ['other', 0, false, ''];
  return {hue: color(family + '-' + shade), hatched, says};
}
// How a context fills an area of this category.
function paint(c, category) {
  const {hue, hatched} = look(category);
  if (!hatched) return hue;
  const tile = document.createElement('canvas'), t = tile.getContext('2d');
  tile.width = tile.height = 8;
  t.fillStyle = hue;
  t.fillRect(0, 0, 8, 8);
  t.strokeStyle = color('card');
  t.lineWidth = 1.6;
  t.beginPath();
  for (const x of [-8, 0, 8]) { t.moveTo(x, 8); t.lineTo(x + 8, 0); }
  t.stroke();
  return c.createPattern(tile, 'repeat');
}
// The same for a box of HTML.
function paintOf(category) {
  const {hue, hatched} = look(category);
  return hatched ? `repeating-linear-gradient(-45deg, ${hue} 0 2px, ${color('card')} 2px 3px)` : hue;
}
function categorySwatch(category) {
  const made = document.createElement('span'), box = document.createElement('i');
  box.style.background = paintOf(category);
  made.title = look(category).says;
  made.append(box, category);
  return made;
}
const categoryRow = (category, text) => `<tr><td><i style="background:${paintOf(category)}"></i>${escape(category)}</td><td>${text}</td></tr>`;
// Black or white, whichever can be read on this colour.
function inkOn(hue) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hue.slice(at, at + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.6 ? '#111' : '#fff';
}
const escape = (text) => text.replace(/[&<>"]/g, (c) => '&#' + c.charCodeAt(0) + ';');
// What keys do on a page: `shown` gives what is shown, [begin, end], `all` what there is; show(begin, span) shows a part, zoom(factor) more or less of it around the middle. `more`: other keys.
function keyboard(shown, all, show, zoom, more = {}) {
  window.addEventListener('keydown', (event) => {
    if (event.target.tagName === 'INPUT' || event.ctrlKey || event.metaKey || event.altKey) return;
    const [from, to] = shown(), [begin, end] = all(), span = to - from;
    const keys = {ArrowLeft: () => show(from - span / 8, span), ArrowRight: () => show(from + span / 8, span), '+': () => zoom(0.5), '=': () => zoom(0.5),
      '-': () => zoom(2), '0': () => show(begin, end - begin), Home: () => show(begin, span), End: () => show(end, span), ...more};
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
// A canvas of the page at the device's resolution: its context, and its width in CSS pixels.
function scaledCanvas(id, height) {
  const canvas = $(id), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + 'px';
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const c = canvas.getContext('2d');
  c.scale(ratio, ratio);
  c.font = '12px system-ui, sans-serif';
  c.textBaseline = 'middle';
  return {c, width};
}
