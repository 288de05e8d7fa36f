"""Best of n: the model writes n answers, judges each, and the likeliest to be good wins.

.venv/bin/python examples/best_of_n.py
"""

import sgray as sgl

QUESTION = "Write one sentence about the sea."


@sgl.function
def best_of_n(s, question, n=4, max_tokens=40):
    s += sgl.user(question)
    branches = s.fork(n)
    for branch in branches:
        branch += sgl.assistant(sgl.gen("answer", max_tokens=max_tokens, temperature=0.8))
        branch += sgl.user("Was that a good answer? Say yes or no.")
        branch += sgl.assistant(sgl.select("verdict", ["yes", "no"]))
    scores = [branch.get_meta_info("verdict")["normalized_prompt_logprobs"] for branch in branches]
    margins = [yes - no for yes, no in scores]
    best = margins.index(max(margins))
    s += sgl.assistant(branches[best]["answer"])
    return branches[best]["answer"]


def main(engine: sgl.Engine | None = None, **options) -> str:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine, **options)
    answer = best_of_n.run(question=QUESTION, backend=engine, **options).return_value
    print(answer)
    return answer


if __name__ == "__main__":
    main()
