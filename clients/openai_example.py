"""Ask questions through the gateway with OpenAI's official Python package.

The example shows one request, one stream, and several requests at the same time. The gateway is
started together with a server (`vlora serve --gateway-port 8080`) or alone (`vlora gateway`).

examples, in the folder of the repository with a server of the demo model:
  python clients/openai_example.py tools/demo/samples/vqa.png "What color is the star?"
  python clients/openai_example.py tools/demo/samples/counting.png --model counting --stream \\
      "How many objects are there in the picture?"
  python clients/openai_example.py tools/demo/samples/vqa.png tools/demo/samples/count.png --each \\
      "Is there a star?"
  python clients/openai_example.py clip.mp4 --frames 4 "What happens?"
  python clients/openai_example.py --list
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import mimetypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import openai
except ImportError:
    sys.exit("error: the package openai is not installed; run: pip install openai")

DEFAULT_URL = "http://127.0.0.1:8080/v1"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "image and video files, then the question"
    parser.add_argument("words", nargs="*", metavar="FILE … QUESTION", help=text)
    text = "URL of the gateway (default: %(default)s)"
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=text)
    text = "name of an adapter, or base (default: %(default)s)"
    parser.add_argument("--model", default="base", metavar="NAME", help=text)
    text = "maximum number of tokens"
    parser.add_argument("--max-tokens", type=whole_number, metavar="N", help=text)
    text = "number of frames to use of each video file (default: the checkpoint decides)"
    parser.add_argument("--frames", type=whole_number, metavar="N", help=text)
    text = "API key, if the gateway has keys (default: $OPENAI_API_KEY)"
    key = os.environ.get("OPENAI_API_KEY", "none")
    parser.add_argument("--key", default=key, metavar="KEY", help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stream", action="store_true", help="print the answer as it arrives")
    text = "ask about each image separately, all at once"
    how.add_argument("--each", action="store_true", help=text)
    how.add_argument("--list", action="store_true", help="list the base model and the adapters")
    given = parser.parse_intermixed_args(arguments)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"--url takes a URL, as in {DEFAULT_URL}, not '{given.url}'")
    if not given.list and (not given.words or Path(given.words[-1]).is_file()):
        parser.error("give a question, with the images before it")
    return given


def whole_number(text: str) -> int:
    """Return the value of an option that takes a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not '{text}'") from None


def request(given: argparse.Namespace, images: Sequence[str], question: str) -> dict[str, Any]:
    """Return the arguments of a chat completion with image and video files and a question."""
    parts: list[dict[str, Any]] = [media_part(Path(name)) for name in images]
    content = [*parts, {"type": "text", "text": question}]
    asked = {"model": given.model, "messages": [{"role": "user", "content": content}]}
    if given.max_tokens:
        asked["max_tokens"] = given.max_tokens
    if given.frames:
        asked["extra_body"] = {"media_io_kwargs": {"video": {"num_frames": given.frames}}}
    return asked


def media_part(file: Path) -> dict[str, Any]:
    """Return an image or video file as a part of a message, inside a data URL."""
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        content = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        sys.exit(f"error: {file} cannot be read: {error.strerror}")
    part = "video_url" if kind.startswith("video/") else "image_url"
    return {"type": part, part: {"url": f"data:{kind};base64,{content}"}}


def ask(client: openai.OpenAI, given: argparse.Namespace) -> None:
    """Ask one question about all images and print the answer, whole or as a stream."""
    *images, question = given.words
    arguments = request(given, images, question)
    if not given.stream:
        answer = client.chat.completions.create(**arguments)
        print(answer.choices[0].message.content)
        return
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


async def ask_each(client: openai.AsyncOpenAI, given: argparse.Namespace) -> None:
    """Ask about all images at the same time. Print the answers in the order of the images."""
    *images, question = given.words

    async def answer(image: str) -> str:
        try:
            given_answer = await client.chat.completions.create(**request(given, [image], question))
        except openai.APIStatusError as error:  # A refused image must not end the other requests.
            return f"error: {explain(error)}"
        return given_answer.choices[0].message.content or ""

    async with client:
        for image, text in zip(images, await asyncio.gather(*map(answer, images)), strict=True):
            print(f"{image}: {text}")


def explain(error: openai.APIStatusError) -> str:
    """Return the gateway's code and message, without the words that the package adds."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return f"{error.code}: {message}" if error.code and message else error.message


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = parse_arguments(arguments)
    try:
        if given.each:
            asyncio.run(ask_each(openai.AsyncOpenAI(base_url=given.url, api_key=given.key), given))
            return
        with openai.OpenAI(base_url=given.url, api_key=given.key) as client:
            if given.list:
                for model in client.models.list():
                    print(model.id)
            else:
                ask(client, given)
    except openai.APIStatusError as error:
        # The gateway's errors have a code. Another server, such as Triton on port 8000, has none.
        unknown = error.status_code == 404 and not error.code
        hint = f"; is {given.url} the URL of a gateway?" if unknown else ""
        sys.exit(f"error: {explain(error)}{hint}")
    except openai.APIConnectionError:
        sys.exit(
            f"error: no gateway answers at {given.url}; start one: vlora serve --gateway-port 8080"
        )
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
