"""Talk to a running service with the official openai client.

scripts/serve                     # in another terminal
.venv/bin/python examples/openai_chat.py "Why is the sky blue?"
"""

import sys

from openai import OpenAI


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="not needed")
    model = client.models.list().data[0].id

    print(f"--- {model}, all at once")
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=100, temperature=0
    )
    print(answer.choices[0].message.content)

    print("--- as it comes")
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=100, temperature=0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
