"""Thousands of requests, sessions and cancels on one model: does memory stay, is nothing left live?

    python scripts/soak.py build/demo.speceyes --requests 2000

Requests to warm up come first, until what is kept of past answers is full. Exit code 1 when resident memory grows by
more than --most behind them, or when a buffer is live after a request.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import speceyes
from PIL import Image
from rich.progress import track

QUESTIONS = ("How much was paid?", "What is this?", "Read the document as JSON.", "Where is the circle?")


def draw(generator: random.Random) -> Image.Image:
    """One of two hundred pictures, so that some are seen again."""
    seed = np.random.default_rng(generator.randrange(200))
    size = (generator.choice((64, 120, 200)), generator.choice((64, 90)))
    return Image.fromarray(seed.integers(0, 256, (6, 8, 3), np.uint8)).resize(size)


def request(model: Any, generator: random.Random) -> str:
    """One request of a kind drawn at random; gives the kind."""
    kind = generator.choice(("whole", "cancelled stream", "batch", "session", "cancelled session", "retracted"))
    options = {"max_new_tokens": generator.randrange(1, 40)}
    question = generator.choice(QUESTIONS)
    if kind == "whole":
        model.generate(question, images=[draw(generator)], **options)
    elif kind == "cancelled stream":
        with model.stream(question, images=[draw(generator)], **options) as stream:
            for _ in range(generator.randrange(3)):
                next(stream, None)
    elif kind == "batch":
        from speceyes.runtime.session import Request

        count = generator.randrange(1, 4)
        model.generate_batch([Request(question, images=[draw(generator)], options=options) for _ in range(count)])
    else:
        session = model.session()
        image = session.push_image(draw(generator))
        session.push_text(question[: generator.randrange(1, len(question))])
        if generator.random() < 0.5:
            session.settle()
        if kind == "retracted":
            session.retract_image(image)
            session.push_image(draw(generator))
        if kind == "cancelled session":
            session.cancel()
        else:
            session.replace_text(question)
            session.commit(**options)
    return kind


def resident() -> int:
    """Bytes of resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=5000)
    parser.add_argument("--cache-size", default="4MB")
    parser.add_argument("--most", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = speceyes.load(options.bundle, settings={"memory": {"cache_size": options.cache_size}})
    generator, counts, live, before = random.Random(options.seed), dict[str, int](), 0, resident()
    for number in track(range(options.warm_up + options.requests), description="asking"):
        if number == options.warm_up:
            before = resident()
        kind = request(model, generator)
        counts[kind] = counts.get(kind, 0) + 1
        live += bool(model.audit().live)
    end, audit = resident(), model.audit()
    growth = end / before - 1
    report = {
        "requests": counts,
        "resident_mb": {"warm": before / 1e6, "end": end / 1e6},
        "growth": growth,
        "requests_that_left_something_live": live,
        "kept_bytes": audit.entry_bytes,
        "evicted": model.pool.statistics.evicted,
    }
    print(json.dumps(report, indent=1))
    return int(growth > options.most or live > 0)


if __name__ == "__main__":
    sys.exit(main())
