"""Few-shot classification: examples stand once in the cache, and `select` scores all labels of a review in one call.

.venv/bin/python examples/few_shot_classification.py
"""

import sgray as sgl

EXAMPLES = [
    ("The food was wonderful and the people were kind.", "positive"),
    ("It broke after a day and nobody answered my letters.", "negative"),
    ("The best film I have seen this year.", "positive"),
    ("I want my money back.", "negative"),
]
REVIEWS = ["I loved every minute of it.", "A terrible waste of time.", "Great value, I would buy it again."]


@sgl.function
def classify(s, examples, review):
    for text, label in examples:
        s += f"Review: {text}\nSentiment: {label}\n\n"
    s += f"Review: {review}\nSentiment: " + sgl.select("label", ["positive", "negative"])


def main(engine: sgl.Engine | None = None) -> list[str]:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine)
    program = classify.bind(examples=EXAMPLES)
    states = program.run_batch([{"review": review} for review in REVIEWS], backend=engine)
    for review, state in zip(REVIEWS, states, strict=True):
        print(f"{state['label']:9} {review}")
    return [state["label"] for state in states]


if __name__ == "__main__":
    main()
