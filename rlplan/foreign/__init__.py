"""Import and export of configurations of verl, TRL, OpenRLHF, slime, NeMo-RL, vLLM and DeepSpeed.

Files and scripts are read as data (shell/script.py, source.py). A table translates each key (table.py), and a plan
answers. Foreign code is never executed, fetched or imported.
"""
