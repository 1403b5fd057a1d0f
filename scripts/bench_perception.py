"""From the complete question to the first token: a session that works ahead beside the same request made at once.

    python scripts/bench_perception.py BUNDLE --picture FILE --question TEXT [--json FILE]

Each round uploads the picture at --mbit megabits a second, types the question at --words words a minute, then commits.
The request made at once begins when the question is complete, with nothing of an earlier one. Then a second question
about the same picture, asked at once. Rounds take turns; medians are printed.
"""

import argparse
import io
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import speceyes
from PIL import Image

PIECE = 1 << 14
SECOND = "And what else?"


def vary(picture: Image.Image, number: int) -> bytes:
    """The picture with its bright parts darkened a little, so that nothing of an earlier round is found."""
    pixels = np.array(picture)
    pixels[pixels > 127] -= 3 * number
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def at_once(model: Any, data: bytes, question: str, tokens: int) -> Any:
    """The whole request when the question is complete."""
    return model.generate(question, images=[data], max_new_tokens=tokens)


def in_pieces(model: Any, data: bytes, question: str, tokens: int, mbit: float, words: float) -> tuple[Any, Any]:
    """Upload, type, commit; then a second question, asked at once."""
    session = model.session()
    image = session.open_image()
    for start in range(0, len(data), PIECE):
        time.sleep(len(data[start : start + PIECE]) * 8 / mbit / 1e6)
        image.push(data[start : start + PIECE])
    image.close()
    for letter in question:
        time.sleep(60 / words / 5)
        session.push_text(letter)
    first = session.commit(max_new_tokens=tokens)
    session.push_text(SECOND)
    return first, session.commit(max_new_tokens=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--question", default="What is the total of this document?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=10)
    parser.add_argument("--words", type=float, default=40, help="a minute, of five letters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    alone = speceyes.load(options.bundle, settings={"memory": {"cache_size": 0}})
    model = speceyes.load(options.bundle)
    picture = Image.open(options.picture).convert("RGB")
    at_once(alone, vary(picture, 0), options.question, 2)
    found: dict[str, list[float]] = {name: [] for name in ("at_once", "session", "second", "hidden", "wasted", "tile")}
    same = 0
    for number in range(options.rounds):
        data = vary(picture, 1 + number)
        whole = at_once(alone, data, options.question, options.tokens)
        first, second = in_pieces(model, data, options.question, options.tokens, options.mbit, options.words)
        stats = first.stats
        same += whole.token_ids == first.token_ids
        found["at_once"].append(whole.stats.first_token_seconds)
        found["session"].append(stats.first_token_seconds)
        found["second"].append(second.stats.first_token_seconds)
        found["hidden"].append(stats.hidden_seconds)
        found["wasted"].append(stats.wasted_seconds)
        found["tile"].append(stats.first_tile_seconds or 0.0)
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    report = {
        "environment": {"processor": platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "bundle": options.bundle.name,
        "tiles": stats.tiles,
        "prompt_tokens": stats.prompt_tokens,
        "rounds": options.rounds,
        "same_tokens": same,
        "seconds": middle,
        "session_beside_at_once": middle["session"] / middle["at_once"],
        "second_beside_first": middle["second"] / middle["at_once"],
    }
    print(f"{options.bundle.name}: {stats.tiles} tiles, {stats.prompt_tokens} tokens")
    print(f"  first token at once  {middle['at_once']:.3f} s")
    print(f"  after working ahead  {middle['session']:.3f} s  {report['session_beside_at_once']:.3f}")
    print(f"  of a second question {middle['second']:.3f} s  {report['second_beside_first']:.3f}")
    print(
        f"  hidden {middle['hidden']:.2f} s, wasted {middle['wasted']:.2f} s, first tile after {middle['tile']:.2f} s; "
        f"{same} of {options.rounds} answers have the same tokens"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
