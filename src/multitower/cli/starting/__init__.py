"""Starting: how a command starts JAX, alone or as one of several processes.

Read `devices.py` first. `local_processes.py` and `layouts.py` start a command several times.
"""
