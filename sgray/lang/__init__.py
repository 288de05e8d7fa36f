"""The language for programs of prompts, and the backends that they run on. `sgray` itself has the public names."""
