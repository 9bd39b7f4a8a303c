// The viewer: a photo under two masks with a line between them. Runs once, with Gradio's `element`,
// `props` and `watch`; its content is `props.value`, see viewer.py.
const $ = (selector) => element.querySelector(selector);
const viewer = $(".viewer"), canvas = $("canvas"), tip = $(".tip");
const left = $(".left-layer"), right = $(".right-layer"), opacity = $(".opacity"), wipe = $(".wipe");
const context = canvas.getContext("2d");
const HEAT = [[13, 8, 60], [126, 36, 104], [229, 107, 58], [252, 232, 164]];
const NO_CLASS = 65535;
let scene = null, changed = 0, started = 0;

async function unpack(text, Numbers) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Numbers(await new Response(stream).arrayBuffer());
}

function heat(percent) {
  const at = Math.min(percent / 100, 0.9999) * (HEAT.length - 1), low = Math.floor(at);
  return HEAT[low].map((value, i) => value + (HEAT[low + 1][i] - value) * (at - low));
}

// Return the canvas of a choice of the two lists, such as `class|as trained`.
function paint(name) {
  if (scene.painted.has(name)) return scene.painted.get(name);
  const [kind, layerName] = name.split("|");
  const layer = scene.layers.get(layerName), trained = scene.layers.get("as trained");
  const { width, height, colors } = scene, picture = new ImageData(width, height);
  const stripe = Math.max(2, Math.round(Math.max(width, height) / 160));
  for (let i = 0; i < width * height; i++) {
    const id = layer.ids[i];
    let color;
    if (kind === "confidence") color = heat(layer.confidence[i]);
    else if (kind === "changes" && id === trained.ids[i]) continue;
    else if (id !== NO_CLASS) color = colors[id];
    else {
      const row = Math.floor(i / width), odd = Math.floor((row + (i % width)) / stripe) % 2;
      color = odd ? [150, 150, 150] : [236, 236, 236];
    }
    picture.data.set(color, 4 * i);
    picture.data[4 * i + 3] = 255;
  }
  const painted = new OffscreenCanvas(width, height);
  painted.getContext("2d").putImageData(picture, 0, 0);
  scene.painted.set(name, painted);
  return painted;
}

function draw() {
  if (!scene) return;
  const { width, height } = scene, line = (width * wipe.value) / 1000;
  context.globalAlpha = 1;
  context.drawImage(scene.photo, 0, 0, width, height);
  context.globalAlpha = opacity.value / 100;
  for (const [list, start, end] of [[left, 0, line], [right, line, width]]) {
    if (list.value === "photo" || end <= start) continue;
    context.save();
    context.beginPath();
    context.rect(start, 0, end - start, height);
    context.clip();
    context.drawImage(paint(list.value), 0, 0);
    context.restore();
  }
  context.globalAlpha = 1;
  const thick = (2 * width) / canvas.clientWidth;
  context.fillStyle = "#000a";
  context.fillRect(line - thick, 0, 2 * thick, height);
  context.fillStyle = "#fff";
  context.fillRect(line - thick / 2, 0, thick, height);
  $(".side.left").textContent = left.selectedOptions[0].text;
  $(".side.right").textContent = right.selectedOptions[0].text;
  $(".side.left").hidden = line < width / 8;
  $(".side.right").hidden = line > (width * 7) / 8;
}

// Name what is under the pointer: the class of each list's layer, once where they agree.
function describe(event) {
  const box = canvas.getBoundingClientRect();
  const x = Math.floor(((event.clientX - box.left) / box.width) * scene.width);
  const y = Math.floor(((event.clientY - box.top) / box.height) * scene.height);
  tip.hidden = x < 0 || y < 0 || x >= scene.width || y >= scene.height;
  if (tip.hidden) return;
  const i = y * scene.width + x, texts = [];
  for (const list of [left, right]) {
    const layer = scene.layers.get(list.value.split("|")[1]);
    if (!layer) continue;
    const name = scene.names[layer.ids[i]] ?? "not confident enough";
    texts.push([name, layer.confidence ? `${name} ${layer.confidence[i]} %` : name]);
  }
  const same = texts.length === 2 && texts[0][0] === texts[1][0];
  tip.textContent = (same ? texts.slice(1) : texts).map((text) => text[1]).join(" → ");
  tip.hidden = texts.length === 0;
  tip.style.left = `${Math.min(Math.max(event.clientX - box.left, 60), box.width - 60)}px`;
  tip.style.top = `${Math.max(event.clientY - box.top - 14, 30)}px`;
}

function move(event) {
  if (!scene) return;
  if (event.buttons & 1) {
    const box = canvas.getBoundingClientRect();
    wipe.value = Math.round((1000 * (event.clientX - box.left)) / box.width);
    draw();
  }
  describe(event);
}

function fill(list, choices, value) {
  list.replaceChildren(...choices.map(([text, name]) => new Option(text, name)));
  list.value = value;
}

async function show() {
  const value = props.value;
  if (!value) return;
  const photo = new Image();
  photo.src = value.photo;
  const layers = new Map();
  for (const { name, ids, confidence } of value.layers) {
    const layer = { ids: await unpack(ids, Uint16Array) };
    if (confidence) layer.confidence = await unpack(confidence, Uint8Array);
    layers.set(name, layer);
  }
  await photo.decode();
  if (props.value.photo !== value.photo || props.value.title !== value.title) return;
  const { width, height, names, colors } = value;
  scene = { width, height, names, colors, photo, layers, painted: new Map() };
  [canvas.width, canvas.height] = [width, height];
  $(".stage").style.width = `min(100%, ${(75 * width) / height}vh)`;
  const choices = [["photo", "photo"]], more = [];
  for (const [name, layer] of layers) {
    choices.push([name, `class|${name}`]);
    if (!layer.confidence) continue;
    more.push([`confidence of ${name}`, `confidence|${name}`]);
    if (layers.has("as trained")) more.push([`changes by ${name}`, `changes|${name}`]);
  }
  fill(left, [...choices, ...more], layers.has("as trained") ? "class|as trained" : "photo");
  fill(right, [...choices, ...more], `class|${value.right}`);
  $(".title").textContent = value.title;
  viewer.classList.toggle("stale", changed > started);
  viewer.hidden = false;
  draw();
}

for (const control of [left, right, opacity, wipe]) control.addEventListener("input", draw);
canvas.addEventListener("pointermove", move);
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  move(event);
});
canvas.addEventListener("pointerleave", () => (tip.hidden = true));
document.addEventListener("selfadapt-started", () => (started = performance.now()));
document.addEventListener("selfadapt-changed", () => {
  changed = performance.now();
  viewer.classList.add("stale");
});
watch("value", show);
show();
