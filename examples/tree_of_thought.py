"""Tree of thought: plans branch, each plan branches into solutions, and the best of all is put into words.

Branches share their beginning in the engine's cache, so that a tree costs little more than its leaves.

.venv/bin/python examples/tree_of_thought.py
"""

import sgray as sgl

QUESTION = "A farmer has 17 sheep. All but 9 run away. How many are left?"


@sgl.function
def tree_of_thought(s, question, width=2, max_tokens=48):
    s += sgl.user(f"{question}\nFirst make a short plan.")
    plans = s.fork(width)
    plans += sgl.assistant(sgl.gen("plan", max_tokens=max_tokens, temperature=0.8))
    plans += sgl.user("Carry out the plan.")
    leaves = []
    for plan in plans:
        solutions = plan.fork(width)
        solutions += sgl.assistant(sgl.gen("solution", max_tokens=max_tokens, temperature=0.8))
        solutions += sgl.user("Is that right? Say yes or no.")
        solutions += sgl.assistant(sgl.select("verdict", ["yes", "no"]))
        leaves += solutions
    best = max(leaves, key=margin)
    s += sgl.assistant(best["solution"])
    s += sgl.user("So the answer is, in one word:")
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0))


def margin(leaf: sgl.ProgramState) -> float:
    yes, no = leaf.get_meta_info("verdict")["normalized_prompt_logprobs"]
    return yes - no


def main(engine: sgl.Engine | None = None, **options) -> str:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine, **options)
    state = tree_of_thought.run(question=QUESTION, backend=engine, **options)
    print(state.text())
    return state["answer"]


if __name__ == "__main__":
    main()
