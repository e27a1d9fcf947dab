// Pictures and clips: reading files, frames of clips, and pictures of the camera.
//
// A medium is {kind: "image" | "clip", urls, width, height, name}. `urls` are data URLs: one for an
// image, and one JPEG per frame for a clip.

const CLIP_FRAMES = 6;
const MAX_BYTES = 40 * 1024 * 1024;
const FRAME_SIDE = 640;
const JPEG_QUALITY = 0.9;
const SEEK_MILLISECONDS = 5000;

/** Return the medium in a file. Throw an Error with a sentence for the user. */
export async function readFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has more than 40 MiB, the limit.`);
  if (file.type.startsWith("video/")) return readClip(file);
  if (!file.type.startsWith("image/")) {
    throw new Error(`${file.name || "This"} is no picture (PNG, JPEG, WebP, GIF, BMP) and no video.`);
  }
  const url = await dataUrl(file);
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    throw new Error(`${file.name} cannot be read as a picture.`);
  }
  const { naturalWidth: width, naturalHeight: height } = image;
  return { kind: "image", urls: [url], width, height, name: file.name };
}

/** Return the data URL of a file. */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** Return a medium with CLIP_FRAMES frames of a clip, at equal intervals. */
async function readClip(file) {
  const video = document.createElement("video");
  video.muted = true;
  video.preload = "auto";
  const url = URL.createObjectURL(file);
  try {
    video.src = url;
    await event(video, "loadeddata");
    const urls = [];
    for (let i = 0; i < CLIP_FRAMES; i++) {
      video.currentTime = (video.duration * (i + 0.5)) / CLIP_FRAMES;
      await event(video, "seeked");
      urls.push(frameOf(video));
    }
    return {
      kind: "clip",
      urls,
      width: video.videoWidth,
      height: video.videoHeight,
      name: file.name,
    };
  } catch {
    throw new Error(`${file.name} cannot be read as a clip by this browser.`);
  } finally {
    video.removeAttribute("src");
    URL.revokeObjectURL(url);
  }
}

/** Wait for an event of a video; fail on its `error` event or after some seconds. */
function event(video, name) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error("too slow")), SEEK_MILLISECONDS);
    const settle = (finish) => () => {
      clearTimeout(timer);
      finish();
    };
    video.addEventListener(name, settle(resolve), { once: true });
    video.addEventListener("error", settle(reject), { once: true });
  });
}

/** Return the present frame of a video as the data URL of a JPEG.
 *
 * The longer side of the JPEG has at most FRAME_SIDE pixels.
 */
export function frameOf(video) {
  const scale = Math.min(1, FRAME_SIDE / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(video.videoWidth * scale));
  canvas.height = Math.max(1, Math.round(video.videoHeight * scale));
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", JPEG_QUALITY);
}

/** Return the medium of one picture of a camera's video. */
export function pictureOf(video) {
  const { videoWidth: width, videoHeight: height } = video;
  return { kind: "image", urls: [frameOf(video)], width, height, name: "camera picture" };
}

/** Return a video element that plays the camera. Throw an Error with a sentence for the user. */
export async function openCamera() {
  if (!navigator.mediaDevices) {
    throw new Error("Browsers allow the camera only over HTTPS, and on localhost.");
  }
  let stream;
  try {
    const wanted = { width: { ideal: 640 }, facingMode: "environment" };
    stream = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    const reason = {
      NotAllowedError: "The browser may not use the camera; allow it for this page.",
      NotFoundError: "No camera was found.",
      NotReadableError: "Another program uses the camera.",
    }[error.name];
    throw new Error(reason ?? `The camera cannot be used: ${error.message}`);
  }
  const video = document.createElement("video");
  video.muted = true;
  video.playsInline = true;
  video.srcObject = stream;
  await video.play();
  return video;
}

/** Switch off the camera of a video element. */
export function closeCamera(video) {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
}

/** Return the part of a message that holds a medium. */
export function messagePart({ kind, urls }) {
  if (kind === "image") return { type: "image_url", image_url: { url: urls[0] } };
  const frames = urls.map((url) => url.slice(url.indexOf(",") + 1));
  return { type: "video_url", video_url: { url: `data:video/jpeg;base64,${frames.join(",")}` } };
}
