"""Every architecture of the installed transformers, tiny and random: ours against eager attention, in fp32 on the CPU.

`python -m tests.transformers_sweep` prints how many are right, refused by us, or neither; `--into docs/transformers.md`
writes the table.
"""
