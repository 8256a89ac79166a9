// A canvas as large as its element, sharp on any screen.

/** Make a canvas ready for a new drawing. Returns its context and its size in CSS pixels. */
export function clean(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** CSS pixels of one rem. */
export const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
