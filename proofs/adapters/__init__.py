"""Adapters against PEFT, which is an oracle that is not ours and no dependency.

training.py     losses and gradients of chained steps, family by family, bit for bit
steps.py        twenty steps of the kinds that agree within rounding
files.py        folders that PEFT writes and reads, and its merged weights
loading.py      adapters of every family, as PEFT loads them
options.py      the words of their commands
"""
