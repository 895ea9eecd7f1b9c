// SPDX-License-Identifier: Apache-2.0
'use strict';
// What the pages share. Each page's script follows it.
const data = JSON.parse(document.getElementById('data').textContent);
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
// Hues far enough apart for neighbours in a stack.
const stack = ['#4e79a7', '#f28e2b', '#59a14f', '#e15759', '#b07aa1', '#76b7b2', '#edc948', '#9c755f', '#ff9da7',
  '#86bcb6', '#d37295', '#a0cbe8', '#8cd17d', '#bab0ac', '#499894', '#d4a6c8'];
const escape = (text) => text.replace(/[&<>"]/g, (c) => '&#' + c.charCodeAt(0) + ';');
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
