// Brings the timelines of a page to life. Time is in milliseconds, x in units of the picture: `width` of them
// show the whole of `total` at zoom 1. Shapes sit in the group "scaled"; ticks and names are written anew.
(() => {
  const MOST_ZOOM = 1e4; // beyond, a browser's single-precision coordinates become coarse
  const MOST_NAMES = 400;
  const SVG = 'http://www.w3.org/2000/svg';

  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.setAttribute('role', 'status'); // read aloud as it changes
  document.body.append(tip);

  function made(name, attributes, text = '') {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  }

  function roundStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  }

  function written(ms, exact) {
    const [scale, unit] = Math.abs(ms) >= 1e3 ? [1e3, 's'] : Math.abs(ms) >= 1 || !ms ? [1, 'ms'] : [1e-3, 'µs'];
    const digits = Math.max(0, Math.ceil(-Math.log10(exact / scale) - 1e-9));
    return `${(ms / scale).toFixed(Math.min(digits, 9))} ${unit}`;
  }

  function bring(root) {
    const plot = root.querySelector('.plot');
    const width = +plot.getAttribute('width');
    const total = +plot.dataset.ms;
    if (!total) return;
    const ground = plot.querySelector('.ground');
    const scaled = plot.querySelector('.scaled');
    const axis = root.querySelector('.axis');
    const names = plot.querySelector('.names');
    const left0 = +plot.getAttribute('x');
    const foot = +axis.dataset.foot;
    const every = [...scaled.querySelectorAll('.span,.mark')].map((shape) => ({
      shape,
      x: +(shape.getAttribute('x') ?? shape.getAttribute('x1')),
      y: +(shape.getAttribute('y') ?? shape.getAttribute('y1')),
      w: +(shape.getAttribute('width') ?? 0),
      name: shape.dataset.name,
    }));
    const shapes = every.filter((one) => one.w).sort((a, b) => b.w - a.w);
    const heights = [...new Set(every.map((one) => one.y))].sort((a, b) => a - b);
    const rows = heights.map((y) => every.filter((one) => one.y === y).sort((a, b) => a.x - b.x));
    const lines = [...scaled.querySelectorAll('.busy')].map((path) => ({
      top: +path.dataset.top,
      height: +path.dataset.height,
      points: path.getAttribute('d').slice(1, -1).split('L').map((point) => point.split(' ').map(Number)),
    }));
    const cursor = made('line', { class: 'cursor', y1: 20, y2: foot, x1: -1, x2: -1 });
    const marked = made('rect', { class: 'marked', y: 20, height: foot - 20, width: 0 });
    const told = new WeakMap();
    let zoom = 1, left = 0, held = null, from = null, asked = false, chosen = null;
    plot.append(marked, cursor);
    plot.setAttribute('tabindex', '0');
    plot.setAttribute('role', 'application');
    plot.setAttribute('aria-label', 'timeline: plus and minus zoom, left and right move, n and p go along the spans');

    function show() {
      asked = false;
      scaled.setAttribute('transform', `scale(${zoom} 1) translate(${-left} 0)`);
      showAxis();
      names.replaceChildren();
      for (const { x, y, w, name } of shapes) { // the widest first: the rest is narrower still
        if (w * zoom <= 12 || names.childElementCount >= MOST_NAMES) break;
        const begin = Math.max((x - left) * zoom, 0), end = Math.min((x + w - left) * zoom, width);
        if (end - begin > 6 * name.length + 6 && name !== 'idle') {
          names.append(made('text', { class: 'name', x: begin + 3, y: y + 12 }, name));
        }
      }
    }
    function showAxis() {
      const begin = left * total / width, seen = total / zoom, step = roundStep(seen / 8);
      axis.replaceChildren();
      for (let n = Math.ceil(begin / step - 1e-9); n * step <= (begin + seen) * (1 + 1e-12); n++) {
        const x = left0 + (n * step - begin) / seen * width;
        axis.append(made('line', { class: 'tick', x1: x, x2: x, y1: 20, y2: foot }));
        axis.append(made('text', { class: 'small time', x, y: 14, 'text-anchor': 'middle' }, n ? written(n * step, step) : '0'));
      }
    }
    function go(toZoom, toLeft) {
      zoom = Math.min(Math.max(toZoom, 1), MOST_ZOOM);
      left = Math.min(Math.max(toLeft, 0), width - width / zoom);
      if (!asked) requestAnimationFrame(show);
      asked = true;
    }
    function at(event) {
      const box = ground.getBoundingClientRect();
      return (event.clientX - box.left) * width / box.width;
    }
    function zoomAround(x, factor) {
      const kept = Math.min(Math.max(zoom * factor, 1), MOST_ZOOM);
      go(kept, left + x / zoom - x / kept);
    }
    function point(event) {
      const x = at(event);
      const now = (left + x / zoom) * total / width;
      cursor.setAttribute('x1', x);
      cursor.setAttribute('x2', x);
      const shape = event.target.closest('.span,.mark');
      const words = [written(now, total / zoom / width)];
      if (shape) words.unshift(wordsOf(shape));
      const box = ground.getBoundingClientRect();
      const y = (event.clientY - box.top) * foot / box.height;
      for (const line of lines) {
        if (y >= line.top - 2 && y <= line.top + line.height + 2) words.unshift(`${Math.round(100 * share(line, left + x / zoom))}% busy`);
      }
      tell(words, event.clientX, event.clientY);
    }
    function tell(words, x, y) {
      tip.textContent = words.join('\n');
      tip.style.display = 'block';
      tip.style.left = `${Math.max(0, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.max(0, Math.min(y + 16, window.innerHeight - tip.offsetHeight - 8))}px`;
    }
    function hush() {
      tip.style.display = 'none';
      cursor.setAttribute('x1', -1);
      cursor.setAttribute('x2', -1);
    }
    function choose(one) { // as the pointer does, for whoever has none
      if (chosen) chosen.shape.classList.remove('chosen');
      chosen = one;
      if (!one) return hush();
      one.shape.classList.add('chosen');
      const middle = one.x + one.w / 2;
      if (middle < left || middle > left + width / zoom) go(zoom, middle - width / zoom / 2);
      show();
      one.shape.scrollIntoView({ block: 'nearest' });
      const box = one.shape.getBoundingClientRect(), seen = ground.getBoundingClientRect();
      tell([wordsOf(one.shape)], Math.min(Math.max(box.left, seen.left), seen.right), box.bottom - 12);
    }
    function near(its, x) {
      return its.reduce((best, one) => (Math.abs(one.x + one.w / 2 - x) < Math.abs(best.x + best.w / 2 - x) ? one : best));
    }
    function along(by) {
      if (!chosen) return across(0);
      const its = rows.find((row) => row.includes(chosen));
      choose(its[Math.min(Math.max(its.indexOf(chosen) + by, 0), its.length - 1)]);
    }
    function across(by) {
      if (!rows.length) return;
      const place = chosen ? rows.findIndex((row) => row.includes(chosen)) + by : 0;
      const x = chosen ? chosen.x + chosen.w / 2 : left;
      choose(near(rows[Math.min(Math.max(place, 0), rows.length - 1)], x));
    }
    function wordsOf(shape) { // the browser would show a title a second time
      const title = shape.querySelector('title');
      if (title) {
        told.set(shape, title.textContent);
        shape.setAttribute('aria-label', title.textContent);
        title.remove();
      }
      return told.get(shape);
    }
    function share(line, x) {
      let low = 0, high = line.points.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (line.points[middle][0] <= x) low = middle; else high = middle - 1;
      }
      const outside = low === line.points.length - 1 || line.points[0][0] > x;
      return outside ? 0 : 1 - (line.points[low][1] - line.top) / line.height;
    }

    plot.addEventListener('wheel', (event) => {
      const scale = event.deltaMode === 1 ? 33 : 1; // lines, in some browsers
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        go(zoom, left + (event.deltaX || event.deltaY) * scale / zoom);
      } else if (zoom > 1 || event.deltaY < 0) { // all is seen: let the page scroll on
        event.preventDefault();
        zoomAround(at(event), Math.exp(-event.deltaY * scale / 300));
      }
    }, { passive: false });
    plot.addEventListener('pointerdown', (event) => {
      if (event.button) return;
      if (event.shiftKey) from = at(event); else held = left + at(event) / zoom;
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener('pointermove', (event) => {
      if (held !== null) go(zoom, held - at(event) / zoom);
      if (from !== null) {
        marked.setAttribute('x', Math.min(from, at(event)));
        marked.setAttribute('width', Math.abs(at(event) - from));
      }
      point(event);
    });
    plot.addEventListener('pointerup', (event) => {
      const wide = from === null ? 0 : Math.abs(at(event) - from);
      if (wide > 3) go(zoom * width / wide, left + Math.min(from, at(event)) / zoom);
      marked.setAttribute('width', 0);
      held = from = null;
    });
    plot.addEventListener('pointerleave', hush);
    plot.addEventListener('dblclick', () => go(1, 0));
    plot.addEventListener('blur', () => choose(null));
    const nearer = () => zoomAround(width / 2, 1.5), further = () => zoomAround(width / 2, 1 / 1.5), all = () => go(1, 0);
    plot.addEventListener('keydown', (event) => {
      const act = {
        '+': nearer, '=': nearer, '-': further, Home: all, Escape: () => choose(null),
        ArrowLeft: () => go(zoom, left - width / zoom / 5), ArrowRight: () => go(zoom, left + width / zoom / 5),
        n: () => along(1), p: () => along(-1), ArrowDown: () => across(1), ArrowUp: () => across(-1),
      }[event.key];
      if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
    });
    const bar = document.createElement('div');
    bar.className = 'zoom';
    for (const [label, said, act] of [['+', 'zoom in', nearer], ['−', 'zoom out', further], ['all', 'show all', all]]) {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = label;
      button.title = said;
      button.addEventListener('click', act);
      bar.append(button);
    }
    root.before(bar);
  }

  for (const root of document.querySelectorAll('svg.timeline')) bring(root);
})();
