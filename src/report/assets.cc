#include "report/assets.h"

namespace motley::report {

const char* const kStyle = R"css(
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2330; --soft: #5b6475; --line: #dde1e8;
  --panel: #f5f6f9; --forward: #3b78d8; --backward: #2b9a86; --optimizer: #8a63c9; --comm: #e08a1e;
  --wait: #c9ced8; --good: #1d7f6d; --bad: #c8443c; --l1: #5aa9a0; --l2: #d9b93a; --l3: #e08a1e;
  --l4: #c8443c; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --ink: #e4e8f0; --soft: #98a2b3;
  --line: #2d333e; --panel: #1c2028; --forward: #5b94ee; --backward: #3fb8a1; --optimizer: #a888e0;
  --comm: #eda345; --wait: #3b424f; --good: #3fb8a1; --bad: #ee6c63; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p { margin: 6px 0; }
.soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 18px 0; }
.fact { background: var(--panel); border-radius: 8px; padding: 10px 12px; overflow-wrap: anywhere; }
.fact b { display: block; font-size: 19px; font-weight: 600; }
.fact span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
.wide table { min-width: 860px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td.n, th.n { white-space: nowrap; }
td { overflow-wrap: break-word; max-width: 480px; }
.bar { display: flex; height: 14px; min-width: 110px; border-radius: 3px; overflow: hidden;
  background: var(--line); }
.bar i { display: block; height: 100%; }
.busy { background: var(--forward); } .comm { background: var(--comm); }
.idle { background: var(--wait); } .fits { background: var(--good); } .over { background: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft);
  margin: 6px 0; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.group { border: 1px solid var(--line); border-radius: 8px; padding: 6px 8px 8px; margin: 3px;
  background: var(--panel); max-width: 100%; }
.group > .title { font-size: 12px; color: var(--soft); overflow-wrap: anywhere; }
.inside { display: flex; flex-wrap: wrap; gap: 3px; }
.hang { display: flex; flex-direction: column; max-width: 100%; }
.wire { display: flex; align-items: stretch; gap: 5px; min-height: 20px; margin-left: 22px; font-size: 12px;
  line-height: 20px; color: var(--soft); }
.wire i { width: 4px; } .wire i.l3 { width: 6px; } .wire i.l4 { width: 8px; }
.leaf { display: flex; flex-direction: column; align-items: center; }
.leaf i { height: 9px; width: 3px; } .leaf i.l3 { width: 5px; } .leaf i.l4 { width: 7px; }
.device { min-width: 22px; height: 22px; padding: 0 4px; border-radius: 4px; color: #fff;
  font: 600 12px/22px system-ui, sans-serif; text-align: center; }
.device.off { opacity: .25; }
.gauge { white-space: nowrap; margin-left: 8px; }
.gauge i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 4px; }
i.l0 { background: var(--wait); } i.l1 { background: var(--l1); } i.l2 { background: var(--l2); }
i.l3 { background: var(--l3); } i.l4 { background: var(--l4); }
.better { color: var(--good); } .worse { color: var(--bad); }
h3 { font-size: 14px; font-weight: 600; margin: 14px 0 4px; }
.cols { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 8px 36px; }
ul.verdict { margin: 6px 0; padding-left: 20px; } ul.verdict li:first-child { font-weight: 600; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--soft); padding: 4px 0; }
#timeline { border: 1px solid var(--line); border-radius: 8px; overflow-y: auto; max-height: 520px;
  position: relative; background: var(--paper); }
#timeline canvas { position: sticky; top: 0; left: 0; display: block; width: 100%;
  touch-action: pan-y; cursor: grab; }
#timeline:focus-visible, canvas:focus-visible { outline: 2px solid var(--forward); }
.tools { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin: 6px 0; }
button { font: inherit; font-size: 13px; padding: 3px 10px; border: 1px solid var(--line);
  border-radius: 6px; background: var(--panel); color: var(--ink); cursor: pointer; }
#hover { min-height: 3em; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 12px; font: 13px/1.5 ui-monospace, monospace; }
@media (max-width: 640px) { body { padding: 16px 12px 40px; } h1 { font-size: 20px; }
  #timeline { max-height: 420px; } }
@media print { body { max-width: none; } }
)css";

const char* const kScript = R"js(
'use strict';
(() => {
  const given = document.getElementById('timeline-data');
  if (!given) return;  // too long to be drawn
  const data = JSON.parse(given.textContent);
  const box = document.getElementById('timeline'), hover = document.getElementById('hover');
  const canvas = box.querySelector('canvas'), spacer = box.querySelector('div');
  const ink = canvas.getContext('2d');
  const row = 22, axis = 20, total = 1e6;
  const kinds = ['forward', 'backward', 'optimizer', 'comm', 'wait'];
  const words = ['forward', 'backward', 'optimizer', 'communication', 'waiting'];
  for (const lane of data.lanes) {
    const b = lane.bars, n = b.length / 5;
    lane.begin = new Float64Array(n); lane.end = new Float64Array(n);
    for (let i = 0, t = 0; i < n; ++i) {
      lane.begin[i] = t += b[5 * i]; lane.end[i] = t += b[5 * i + 1];
    }
  }
  let from = 0, to = total, width = 0, height = 0, colours = [], text = '', line = '', paper = '';
  const seconds = t => {
    const s = t / total * data.end;
    for (const [unit, size] of [['s', 1], ['ms', 1e-3], ['µs', 1e-6]])
      if (Math.abs(s) >= size) return +(s / size).toPrecision(4) + ' ' + unit;
    return +(s * 1e9).toPrecision(4) + ' ns';
  };
  const labels = () => Math.min(210, width * 0.34);
  const x = t => labels() + (t - from) / (to - from) * (width - labels());
  const time = px => from + (px - labels()) / (width - labels()) * (to - from);
  const first = (ends, t) => {  // the first bar that ends after t
    let a = 0, b = ends.length;
    while (a < b) { const m = (a + b) >> 1; if (ends[m] > t) b = m; else a = m + 1; }
    return a;
  };
  const short = (s, most) => {
    if (ink.measureText(s).width <= most) return s;
    while (s.length > 1 && ink.measureText(s + '…').width > most) s = s.slice(0, -1);
    return s + '…';
  };
  function draw() {
    ink.clearRect(0, 0, width, height);
    ink.font = '12px system-ui, sans-serif';
    ink.textBaseline = 'middle';
    const top = box.scrollTop, low = Math.floor(top / row),
          high = Math.min(data.lanes.length, Math.ceil((top + height) / row));
    for (let l = low; l < high; ++l) {
      const lane = data.lanes[l], b = lane.bars, y = axis + l * row - top + 3;
      for (let i = first(lane.end, from); i < lane.end.length && lane.begin[i] < to; ++i) {
        const left = Math.max(labels(), x(lane.begin[i])), right = Math.min(width, x(lane.end[i]));
        ink.fillStyle = colours[b[5 * i + 2]];
        const gap = right - left > 4 ? 1 : 0;
        ink.fillRect(left, y, Math.max(0.6, right - left - gap), row - 6);
        if (right - left > 26 && b[5 * i + 2] < 4) {
          let name = data.names[b[5 * i + 3]].replace(/^(forward|backward) /, '').replace('aten::', '');
          if (ink.measureText(name).width < right - left - 8) {
            ink.fillStyle = paper; ink.fillText(name, left + 4, y + row / 2 - 3);
          }
        }
      }
      ink.fillStyle = text;
      ink.fillText(short(lane.label, labels() - 12), 6, y + row / 2 - 3);
    }
    ink.fillStyle = paper; ink.fillRect(0, 0, width, axis);
    ink.strokeStyle = line; ink.fillStyle = text; ink.beginPath();
    const most = Math.max(2, Math.floor((width - labels()) / 110));
    let step = Math.pow(10, Math.floor(Math.log10((to - from) / total * data.end / most)));
    while ((to - from) / total * data.end / step > most) step *= 2;
    const unit = step / data.end * total;
    for (let t = Math.ceil(from / unit) * unit; t <= to; t += unit) {
      const px = Math.round(x(t)) + 0.5;
      ink.moveTo(px, axis - 4); ink.lineTo(px, height);
      if (px < width - 40) ink.fillText(seconds(t), px + 3, axis / 2);
    }
    ink.globalAlpha = 0.5; ink.stroke(); ink.globalAlpha = 1;
  }
  function resize() {
    const style = getComputedStyle(document.documentElement);
    colours = kinds.map(k => style.getPropertyValue('--' + k));
    text = style.getPropertyValue('--ink'); line = style.getPropertyValue('--line');
    paper = style.getPropertyValue('--paper');
    width = box.clientWidth;
    const most = window.innerWidth < 640 ? 420 : 520;
    height = Math.min(axis + data.lanes.length * row + 4, most);
    const dots = window.devicePixelRatio || 1;
    canvas.width = width * dots; canvas.height = height * dots;
    canvas.style.height = height + 'px';
    spacer.style.height = Math.max(0, axis + data.lanes.length * row + 4 - height) + 'px';
    ink.setTransform(dots, 0, 0, dots, 0, 0);
    draw();
  }
  function move(a, b) {
    const span = Math.min(total, Math.max(2, b - a));
    from = Math.min(Math.max(0, a), total - span); to = from + span;
    draw();
  }
  const zoom = (factor, at) => {
    const t = at === undefined ? (from + to) / 2 : at;
    move(t - (t - from) * factor, t + (to - t) * factor);
  };
  const pan = part => move(from + part * (to - from), to + part * (to - from));
  const point = e => {
    const r = canvas.getBoundingClientRect();
    return [e.clientX - r.left, e.clientY - r.top];
  };
  function tell(e) {
    const [px, py] = point(e), l = Math.floor((py - axis + box.scrollTop) / row),
          lane = data.lanes[l];
    if (!lane || py < axis || px < labels()) return;
    const t = time(px), i = first(lane.end, t), b = lane.bars;
    if (i >= lane.end.length || lane.begin[i] > t) {
      hover.textContent = lane.label + ': idle at ' + seconds(t); return;
    }
    const more = b[5 * i + 4] - 1;
    hover.textContent = lane.label + ': ' + data.names[b[5 * i + 3]] +
      (more ? ' and ' + more + ' more' : '') + ' (' + words[b[5 * i + 2]] + '), from ' +
      seconds(lane.begin[i]) + ' for ' + seconds(lane.end[i] - lane.begin[i]);
  }
  const down = new Map();
  canvas.addEventListener('pointerdown', e => {
    down.set(e.pointerId, e.clientX); canvas.setPointerCapture(e.pointerId); tell(e);
  });
  canvas.addEventListener('pointermove', e => {
    if (!down.has(e.pointerId)) { tell(e); return; }
    const before = down.get(e.pointerId);
    if (down.size === 2) {  // pinch
      const other = [...down].find(([id]) => id !== e.pointerId)[1];
      const old = Math.abs(before - other), now = Math.abs(e.clientX - other);
      if (old > 8 && now > 8)
        zoom(old / now, time((e.clientX + other) / 2 - canvas.getBoundingClientRect().left));
    } else {
      pan((before - e.clientX) / (width - labels()));
    }
    down.set(e.pointerId, e.clientX);
  });
  for (const name of ['pointerup', 'pointercancel'])
    canvas.addEventListener(name, e => down.delete(e.pointerId));
  canvas.addEventListener('wheel', e => {
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault(); zoom(Math.exp(e.deltaY / 300), time(point(e)[0]));
    } else if (e.deltaX) {
      e.preventDefault(); pan(e.deltaX / (width - labels()));
    }
  }, {passive: false});
  canvas.addEventListener('dblclick', e => zoom(0.4, time(point(e)[0])));
  canvas.addEventListener('keydown', e => {
    const act = {'+': () => zoom(0.6), '=': () => zoom(0.6), '-': () => zoom(1 / 0.6),
                 '0': () => move(0, total), 'ArrowLeft': () => pan(-0.2),
                 'ArrowRight': () => pan(0.2)}[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  document.getElementById('in').addEventListener('click', () => zoom(0.5));
  document.getElementById('out').addEventListener('click', () => zoom(2));
  document.getElementById('all').addEventListener('click', () => move(0, total));
  box.addEventListener('scroll', draw);
  window.addEventListener('resize', resize);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', resize);
  resize();
})();
)js";

}  // namespace motley::report
