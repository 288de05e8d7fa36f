"""An agent that reasons and acts (ReAct): it writes a thought, calls a tool, reads what came of it, and goes on.

The whole course is one text, so each step finds everything before it in the engine's cache; while a tool works, the
engine keeps it there. Which tool comes next is a choice and never a misspelling, and what a tool is given has a form.

.venv/bin/python examples/react_agent.py
"""

import sgray as sgl

POPULATION = {"France": 68, "Germany": 83, "Italy": 59, "Spain": 48}  # millions

HEAD = """Answer the question with the help of tools.
population: the people of a country, in millions. Input: the name of a country.
calculator: the sum of two numbers. Input: the numbers, like 3 + 4.

Question: How many millions live in Italy and Spain?
Thought: I need the people of Italy.
Action: population
Input: Italy
Observation: 59
Thought: I need the people of Spain.
Action: population
Input: Spain
Observation: 48
Thought: I add them.
Action: calculator
Input: 59 + 48
Observation: 107
Thought: I know the answer.
Action: finish
Answer: 107

Question: """
INPUTS = {"population": "|".join(POPULATION), "calculator": r"[0-9]{1,3} \+ [0-9]{1,3}"}


def call(tool: str, given: str) -> str:
    """What a tool answers."""
    if tool == "population":
        return str(POPULATION[given])
    left, _, right = given.partition(" + ")
    return str(int(left) + int(right))


@sgl.function
def react(s, question, max_steps=6):
    s += HEAD + question + "\n"
    for _ in range(max_steps):
        s += "Thought:" + sgl.gen("thought", max_tokens=24, stop="\n") + "\n"
        s += "Action: " + sgl.select("action", [*INPUTS, "finish"]) + "\n"
        if s["action"] == "finish":
            break
        s += "Input: " + sgl.gen("input", max_tokens=12, regex=INPUTS[s["action"]]) + "\n"
        s += f"Observation: {call(s['action'], s['input'])}\n"
    s += "Answer:" + sgl.gen("answer", max_tokens=8, stop="\n")


def main(engine: sgl.Engine | None = None, question="How many millions live in France and Germany?", **options) -> str:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine, question, **options)
    state = react.run(question=question, temperature=0, backend=engine, **options)
    print(state.text().removeprefix(HEAD))
    return state.text().removeprefix(HEAD)


if __name__ == "__main__":
    main()
