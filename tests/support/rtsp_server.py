"""An RTSP camera of 320 x 240 pixels by GStreamer, for the system's Python.

`python3 rtsp_server.py PORT [--frames N] [--user NAME --password TEXT]` serves
`rtsp://127.0.0.1:PORT/camera`, prints its port (0 chooses one), and obeys lines of its standard
input: `size WIDTH HEIGHT`. With --frames, the stream ends after so many frames of a connection.

With `--clips FILE... --count N --rate R --shift S`, it serves N cameras at `/0`, `/1` and so on,
which repeat clips that were encoded beforehand: of each FILE the access units, each behind its
length in four bytes. At Unix time t, camera n shows frame (t · R + n · S) of its clip.
"""

import argparse
import sys
import time
from pathlib import Path

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402

PIPELINE = (
    "( videotestsrc is-live=true pattern=ball num-buffers={frames} ! videoconvert ! videoscale"
    " ! capsfilter name=caps caps=video/x-raw,width=320,height=240,framerate=15/1"
    " ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=15 sliced-threads=false"
    " ! rtph264pay name=pay0 pt=96 config-interval=-1 mtu={mtu} )"
)
CLIP = (
    "( appsrc name=src is-live=true format=time do-timestamp=true max-buffers=50"
    " leaky-type=downstream caps=video/x-h264,stream-format=byte-stream,alignment=au"
    " ! h264parse ! rtph264pay name=pay0 pt=96 config-interval=-1 )"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port")
    parser.add_argument("--frames", default=-1)
    parser.add_argument("--mtu", default=1400)
    parser.add_argument("--clips", nargs="+", type=Path)
    for name in ("--count", "--rate", "--shift"):
        parser.add_argument(name, type=int)
    parser.add_argument("--user")
    parser.add_argument("--password")
    options = parser.parse_args()
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(options.port)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(PIPELINE.format(frames=options.frames, mtu=options.mtu))
    factory.set_shared(True)
    medias = []
    factory.connect("media-configure", lambda factory, media: medias.append(media))
    if options.user:
        require_password(server, factory, options.user, options.password)
    server.get_mount_points().add_factory("/camera", factory)
    if options.clips:
        serve_clips(server, options)
    server.attach(None)
    GLib.io_add_watch(sys.stdin, GLib.IO_IN, lambda *_: obey(medias, sys.stdin.readline()))
    print(server.get_bound_port(), flush=True)
    GLib.MainLoop().run()


def require_password(server, factory, user: str, password: str) -> None:
    auth = GstRtspServer.RTSPAuth()
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth.add_basic(GstRtspServer.RTSPAuth.make_basic(user, password), token)
    server.set_auth(auth)
    permissions = GstRtspServer.RTSPPermissions()
    for name in ("media.factory.access", "media.factory.construct"):
        permissions.add_permission_for_role("viewer", name, True)
    factory.set_permissions(permissions)


def obey(medias, line: str) -> bool:
    """Change the size of the pictures. Return whether more lines may come."""
    if line.startswith("size "):
        _, width, height = line.split()
        caps = Gst.Caps.from_string(f"video/x-raw,width={width},height={height},framerate=15/1")
        medias[-1].get_element().get_by_name("caps").set_property("caps", caps)
    return bool(line)


def read_units(path: Path) -> list[bytes]:
    content, units = path.read_bytes(), []
    while content:
        end = 4 + int.from_bytes(content[:4], "big")
        units.append(content[4:end])
        content = content[end:]
    return units


def serve_clips(server, options: argparse.Namespace) -> None:
    clips = [read_units(path) for path in options.clips]
    playing = {}  # Of each camera that is connected: its source, and the next frame.

    def configure(factory, media, number: int) -> None:
        source = media.get_element().get_by_name("src")
        playing[number] = [source, int(time.time() * options.rate)]

    def push() -> bool:
        now = int(time.time() * options.rate)
        for number, one in playing.items():
            units = clips[number % len(clips)]
            for index in range(one[1], now + 1):
                unit = units[(index + options.shift * number) % len(units)]
                one[0].emit("push-buffer", Gst.Buffer.new_wrapped(unit))
            one[1] = now + 1
        return True

    for number in range(options.count):
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_launch(CLIP)
        factory.set_shared(True)
        factory.connect("media-configure", configure, number)
        server.get_mount_points().add_factory(f"/{number}", factory)
    GLib.timeout_add(20, push)


main()
