"""JSON schemas (Draft 2020-12) as grammars: `compiler` is the way in, `document` what is read, the others one part each."""
