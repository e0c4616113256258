"""Adapters on their way into the store, and between the store and folders.

start.py         the first values of new adapters
peft_config.py   adapter_config.json: a strict reader and a writer
names.py         what PEFT calls a param
peft_targets.py  how PEFT finds the adapted modules
folder.py        an adapter folder, checked and loaded
export.py        an adapter folder, written
merge.py         adapters added to the weights of an export
"""
