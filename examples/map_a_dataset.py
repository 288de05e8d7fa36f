"""Map a Ray dataset through the deployed service: each row is a call, made through the deployment's handle.

Blocks of the dataset go to a few actors; each keeps at most IN_FLIGHT calls running and takes the next row when
one is answered. So the service is kept busy and is never handed more than it can take, however large the dataset: what
is not asked yet stays in the dataset, which reads no further than its actors can take either.

scripts/serve                                  # in another terminal
.venv/bin/python examples/map_a_dataset.py     # in a job on the same cluster; needs ray[data]
"""

import asyncio

import ray
from ray import serve

NUM_ACTORS = 2
IN_FLIGHT = 16  # calls of one actor
ROWS_A_BLOCK = 64

REVIEWS = [
    "The food was cold and the waiter was rude.",
    "A wonderful evening, we will come back!",
    "It broke after two days.",
    "Exactly what I was looking for.",
]


class Labeller:
    """An actor of Ray Data, which gives it blocks and takes back blocks."""

    def __init__(self, model: str, in_flight: int = IN_FLIGHT) -> None:
        self.model = model
        self.service = serve.get_app_handle("sgray")
        self.room = asyncio.Semaphore(in_flight)

    async def __call__(self, block: dict) -> dict:
        labels = await asyncio.gather(*(self.label(str(text)) for text in block["text"]))
        return {"text": list(block["text"]), "label": list(labels)}

    async def label(self, text: str) -> str:
        body = {
            "model": self.model,
            "prompt": f"Review: {text}\nIs it good or bad? It is",
            "max_tokens": 4,
            "temperature": 0,
            "regex": " (good|bad)",
            "priority": -10,  # whoever waits for an answer goes first
        }
        async with self.room:
            answer = await self.service.completions.remote(body)
        return answer["choices"][0]["text"].strip()


def labelled(
    texts: list[str], model: str = "smollm2-135m-instruct", num_actors: int = NUM_ACTORS, in_flight: int = IN_FLIGHT
) -> ray.data.Dataset:
    """The dataset with labels; nothing is computed before somebody reads it."""
    dataset = ray.data.from_items([{"text": text} for text in texts])
    return dataset.map_batches(
        Labeller,
        fn_constructor_args=(model, in_flight),
        batch_size=ROWS_A_BLOCK,
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=0,
    )


def main(texts: list[str] = REVIEWS * 8, **options) -> list[dict]:
    if not ray.is_initialized():
        ray.init(address="auto")
    rows = labelled(texts, **options).take_all()
    for row in rows[:4]:
        print(f"{row['label']:4} {row['text']}")
    return rows


if __name__ == "__main__":
    main()
