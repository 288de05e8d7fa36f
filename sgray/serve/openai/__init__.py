"""The OpenAI-compatible border: bodies to requests, deltas to answers. Knows HTTP and text, not Ray and not torch."""
