"""The Triton kernels, one folder an operation; nothing else in the project knows Triton.

A folder's docstring is the contract: shapes, types, strides, who allocates. `reference.py` says in plain torch what is
computed, `kernel.py` computes it on a GPU; both have functions of the same names and signatures. Only `kernel.py` needs
Triton, so the references (and the whole engine on a CPU) run without it.
"""
