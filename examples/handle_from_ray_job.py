"""Call the service from other Ray code, without HTTP: the ingress deployment's handle takes the same bodies.

scripts/serve                                     # in another terminal
.venv/bin/python examples/handle_from_ray_job.py        # in a job on the same cluster: no address needed
"""

import ray
from ray import serve

QUESTIONS = ["Name a fruit.", "Name a colour.", "Name a river.", "Name a metal."]


def body(question: str, *, stream: bool = False) -> dict:
    return {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": stream,
    }


@ray.remote(num_cpus=0)
def ask(question: str) -> str:
    """Any task or actor can hold a handle."""
    handle = serve.get_app_handle("sgray")
    answer = handle.chat.remote(body(question)).result()
    return answer["choices"][0]["message"]["content"]


def main() -> None:
    ray.init(address="auto")
    answers = ray.get([ask.remote(question) for question in QUESTIONS])
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} -> {answer}")

    handle = serve.get_app_handle("sgray").options(stream=True)
    for chunk in handle.chat.remote(body("Count to ten.", stream=True)):
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
