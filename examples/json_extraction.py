"""Facts out of a text, in the form of a pydantic model: the schema binds what the model can write.

.venv/bin/python examples/json_extraction.py
"""

from pydantic import BaseModel

import sgray as sgl

TEXT = "Marie Curie was born in Warsaw in 1867 and won the Nobel Prize twice."


class Person(BaseModel):
    name: str
    born: int


@sgl.function
def extract(s, text):
    s += sgl.user(f"{text}\nWho is it about, and in which year was she born? Answer in JSON.")
    s += sgl.assistant(sgl.gen("person", max_tokens=64, temperature=0, json_schema=Person))


def main(engine: sgl.Engine | None = None, **options) -> Person:
    if engine is None:
        with sgl.Engine() as engine:
            return main(engine, **options)
    state = extract.run(text=TEXT, backend=engine, **options)
    person = Person.model_validate_json(state["person"])
    print(person)
    return person


if __name__ == "__main__":
    main()
