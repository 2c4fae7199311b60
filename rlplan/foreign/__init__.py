"""Other people's configurations as ours, and ours as theirs: verl, TRL, OpenRLHF, slime, NeMo-RL, vLLM, DeepSpeed.

Files and scripts are read as data (shell/script.py, source.py), what they say is translated row by row of a table
(`tables/*.yaml`, table.py), and answered with a plan. Nothing of theirs is executed, fetched or imported.
"""
