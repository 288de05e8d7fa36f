"""Grammars for what a model may write: `schema`, `regex` and `ebnf` are the ways in; all of them come out as GBNF."""
