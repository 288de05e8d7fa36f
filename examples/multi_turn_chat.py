"""A conversation of several turns, printed as it is written; each turn goes on from the cached one before.

.venv/bin/python examples/multi_turn_chat.py
"""

import sgray as sgl

QUESTIONS = ["What is the capital of France?", "Name one thing to see there.", "Thank you. Say goodbye in French."]


@sgl.function
def conversation(s, questions, max_tokens=40):
    s += sgl.system("You are a helpful guide. Answer in one sentence.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=max_tokens, temperature=0))


def main(engine: sgl.Engine | None = None, **options) -> list[dict]:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine, **options)
    state = conversation.run(questions=QUESTIONS, backend=engine, stream=True, **options)
    for number, question in enumerate(QUESTIONS):
        print(f"\n> {question}")
        for piece in state.text_iter(f"answer_{number}"):
            print(piece, end="", flush=True)
    print()
    return state.messages()


if __name__ == "__main__":
    main()
