"""JSON schemas (Draft 2020-12) as grammars: `compiler` is the way in, `document` reads, `branches` sorts out."""
