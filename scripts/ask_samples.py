"""Ask a bundle about a handful of sample pictures and print answers, expected answers and timings."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import speceyes


def choose(samples: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first sample of each group of questions, then the second of each, until there are `count`."""
    seen: dict[str, int] = {}
    ranked = []
    for number, sample in enumerate(samples):
        group = sample["kind"].split("/")[0]
        seen[group] = seen.get(group, 0) + 1
        ranked.append((seen[group], number, sample))
    return [sample for _, _, sample in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("samples", type=Path, help="folder with samples.json and the pictures it names")
    parser.add_argument("--count", type=int, default=6)
    options = parser.parse_args()
    samples = json.loads((options.samples / "samples.json").read_text())

    began = time.perf_counter()
    model = speceyes.load(options.bundle)
    print(f"{options.bundle} loaded in {time.perf_counter() - began:.2f} s")
    right = same = 0
    chosen = choose(samples, options.count)
    for sample in chosen:
        images = [options.samples / name for name in sample["images"]]
        result = model.generate(sample["question"], images=images)
        stats, equal = result.stats, result.text.strip() == sample["answer"].strip()
        right += equal
        print(f"\n{', '.join(sample['images'])}: {sample['question']}")
        print(f"  answer    {result.text.strip()}")
        print(f"  expected  {sample['answer']}{'' if equal else '   (differs)'}")
        print(
            f"  first token {stats.first_token_seconds * 1e3:.0f} ms, {stats.new_tokens} tokens "
            f"at {stats.tokens_per_second:.0f} tokens/s"
        )
        same += model.generate(sample["question"], images=images, speculate=False).token_ids == result.token_ids
    print(f"\n{right} of {len(chosen)} answers as expected")
    rounds = model.statistics
    print(
        f"speculation: {rounds.tokens_per_round:.1f} tokens a pass, {rounds.precision:.0%} of the drafts right, "
        f"the same tokens as plain decoding in {same} of {len(chosen)} answers"
    )


if __name__ == "__main__":
    main()
