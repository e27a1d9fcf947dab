"""Ask a question about pictures and print the answer while it is generated.

The client sends image files and a question to the ensemble `visual_retrieval` over gRPC.

examples:
  python clients/visual_retrieval.py scene.png "What color is the star?"
  python clients/visual_retrieval.py scene.png --task caption
  python clients/visual_retrieval.py scene.png "red circle" --task refer
  python clients/visual_retrieval.py part.png --adapter digits --task classify --show-timing
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run as a file

from clients import common
from clients.common import ClientError

MODEL = "visual_retrieval"
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".ts", ".mpg", ".mpeg"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="IMAGE … QUESTION",
        help="image files (none for a text-only question), then the question; the tasks caption,"
        " classify and video need no question",
    )
    common.add_server_arguments(parser)
    text = "maximum number of tokens in the answer"
    parser.add_argument("--max-tokens", type=common.whole_number, metavar="N", help=text)
    text = "sampling temperature (default: 0, greedy)"
    parser.add_argument("--temperature", type=common.decimal_number, metavar="T", help=text)
    text = "seed for a temperature above 0"
    parser.add_argument("--seed", type=common.whole_number, metavar="N", help=text)
    text = "restrict the answer to one of these texts; give this option last"
    parser.add_argument("--choices", nargs="+", metavar="ANSWER", help=text)
    parser.add_argument("--show-timing", action="store_true", help="print latency and token counts")
    return parser.parse_intermixed_args(arguments)


def split_words(words: Sequence[str]) -> tuple[list[Path], str]:
    """Return the image files and the question. A word that names a file is an image file.

    Raises ClientError for a folder, a video, or a missing file.
    """
    images: list[Path] = []
    question: list[str] = []
    for word in words:
        path = Path(word)
        exists = _exists(path)
        in_folder = "/" in word and path.parent != Path() and _exists(path.parent)
        named_as_image = " " not in word and (path.suffix.lower() in IMAGE_SUFFIXES or in_folder)
        if named_as_image and not exists:
            raise ClientError(f"the file {word} does not exist")
        if exists and path.is_dir() and (named_as_image or "/" in word or word == words[0]):
            raise ClientError(f"{word} is a folder: give the image files in it")
        if exists and path.is_file():
            images.append(path)
        else:
            question.append(word)
    for image in images:
        if image.suffix.lower() in VIDEO_SUFFIXES:
            raise ClientError(f"{image} is a video: use clients/video_analytics.py")
    return images, " ".join(question)


def read_image(path: Path) -> bytes:
    """Return the content of a file. Raise ClientError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClientError(f"cannot read {path}: {error.strerror}") from None


def name_image(message: str, images: Sequence[Path]) -> str:
    """Return an error with the name of the file that it calls `image N`."""
    number = re.search(r"\bimage (\d+)\b", message)
    if number is None or int(number[1]) >= len(images):
        return message
    return f"{message} ({number[0]}: {images[int(number[1])]})"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A text that is too long for a path.
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    images, question = split_words(options.words)
    inputs = common.request_inputs(
        question,
        images=[read_image(image) for image in images],
        task=options.task,
        sampling=common.sampling_parameters(
            options.adapter,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            choices=options.choices,
        ),
    )
    client = common.connect(options.url, MODEL)
    try:
        start = time.perf_counter()
        first = 0.0
        tokens = 0
        finish = text = ""
        headers = common.routing_headers(options.adapter)
        for response in common.stream_responses(client, MODEL, inputs, headers=headers):
            first = first or time.perf_counter() - start
            piece = common.first_string(response, "text_output")
            print(piece, end="", flush=True)
            text += piece
            tokens += common.first_number(response, "num_output_tokens")
            finish = common.first_string(response, "finish_reason")
        print()
        if not text.strip():
            print(f"(empty answer, finish reason {finish})", file=sys.stderr)
        if options.show_timing:
            total = time.perf_counter() - start
            print(
                f"[first token {first * 1e3:.0f} ms, complete answer {total * 1e3:.0f} ms,"
                f" {tokens} tokens, finish reason {finish}]",
                file=sys.stderr,
            )
    except InferenceServerException as error:
        raise ClientError(name_image(common.explain(error), images)) from error
    finally:
        client.close()


if __name__ == "__main__":
    common.run_main(main)
