"""Local updates: every tower makes updates of its own, and the towers meet after every H of them.

Read `job.py` first: what a tower does, and what happens when they meet. `runner.py` runs a step as
programs for one device each, and `calls.py` several steps in one call. `looped.py` runs many steps
as one program.
"""
