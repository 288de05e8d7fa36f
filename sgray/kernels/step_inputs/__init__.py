"""From the one buffer that the host sends a step to everything that the step's kernels read.

`StepWords` says where things lie in the buffer (int32): a header, one word a sequence of each kind, then the tokens,
then the new pages. `expand_step` writes the new pages into the page table and fills, for every row of the step, its
token, its position and its place in the pool; for every sequence, the row, slot and position from which its next token
is drawn. `record_tokens` keeps drawn tokens by slot, so that the next step finds them where the host only wrote
`ON_DEVICE`.

Rows and sequences beyond the step's numbers, up to the capacities of the tensors, are padding: token 0, position 0,
location -1, slot -1.
"""
