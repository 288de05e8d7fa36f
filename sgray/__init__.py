"""sgray: an LLM inference engine with a radix-tree prefix cache that runs as a Ray Serve application."""

__version__ = "0.1.0"
