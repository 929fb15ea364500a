"""Make ``prompts.jsonl``: questions about documents, many about each, in no particular order.

    python examples/batch_inference/make_prompts.py

Equal arguments give the same file. The documents are passages of the book in ``examples/data``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

from qwen3_omni.conversation import read_passages

HERE = Path(__file__).parent
BOOK = HERE.parent / "data" / "alice_in_wonderland.txt"
SYSTEM_PROMPT = "Answer the question about the text in one sentence, and only from what is written there."
WHAT = ("Who is in it", "Where does it take place", "What happens first", "What happens last", "What is said aloud")
HOW = ("in a few words", "as for a child", "with a quotation", "in French", "or say that it cannot be told")


def make_prompts(documents: int, questions: int, seed: int) -> list[dict[str, object]]:
    """As many questions about as many documents each, shuffled.

    Args:
        documents: runs of two to four passages of the book, no two alike.
        questions: about each.
        seed: of the choice and of the order.
    """
    rng = random.Random(seed)
    passages = read_passages(BOOK)
    spans = [(start, start + count) for count in (2, 3, 4) for start in range(len(passages) - count + 1)]
    asked = [f"{what}, {how}?" for what, how in itertools.product(WHAT, HOW)]
    prompts: list[dict[str, object]] = []
    for number, (start, stop) in enumerate(rng.sample(spans, documents)):
        text = "\n\n".join(passages[start:stop])
        for index, question in enumerate(rng.sample(asked, questions)):
            messages = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": f"{text}\n\n{question}"},
            ]
            prompts.append({"id": f"document-{number}-question-{index}", "messages": messages})
    rng.shuffle(prompts)
    return prompts


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Make the sample of prompts.")
    parser.add_argument("--documents", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=20, help="about each; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--to", type=Path, default=HERE / "prompts.jsonl", help="default: %(default)s")
    options = parser.parse_args()
    lines = [json.dumps(prompt) for prompt in make_prompts(options.documents, options.questions, options.seed)]
    options.to.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.to}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
