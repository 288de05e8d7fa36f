"""Label texts through the batch API of a running service, with the official openai client.

.venv/bin/sgray serve --batches-dir /tmp/batches        # in another terminal
.venv/bin/python examples/batch_labelling.py
"""

import json
import time

from openai import OpenAI

LABELS = ["positive", "negative"]
REVIEWS = ["I loved every minute of it.", "A terrible waste of time.", "Great value, I would buy it again."]


def row(number, review, model):
    messages = [{"role": "user", "content": f"Is this review {' or '.join(LABELS)}? Answer in one word.\n\n{review}"}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, "guided_choice": LABELS}
    return {"custom_id": f"review-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def main(base_url: str = "http://127.0.0.1:8000/v1", poll_s: float = 1.0) -> dict[str, str]:
    client = OpenAI(base_url=base_url, api_key="not needed")
    model = client.models.list().data[0].id
    rows = "\n".join(json.dumps(row(number, review, model)) for number, review in enumerate(REVIEWS))
    file = client.files.create(file=("reviews.jsonl", rows.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(poll_s)
        batch = client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        raise SystemExit(f"the batch is {batch.status}: {batch.errors or batch.error_file_id}")
    labels = {}
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        number = int(answer["custom_id"].removeprefix("review-"))
        labels[REVIEWS[number]] = answer["response"]["body"]["choices"][0]["message"]["content"]
        print(f"{labels[REVIEWS[number]]:9} {REVIEWS[number]}")
    return labels


if __name__ == "__main__":
    main()
