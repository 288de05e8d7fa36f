"""Tool calls in a model's text: `parser` is the way in, `calls` what comes out; the others read one notation each."""
