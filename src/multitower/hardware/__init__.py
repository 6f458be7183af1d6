"""What this machine has: its devices, their memory, and what must be set before JAX starts.

The folder is not called `devices`, because `multitower.devices` is a public function.
Read `devices.py` first, then `configuration.py`.
"""
