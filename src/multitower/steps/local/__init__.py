"""Local updates: every tower makes updates of its own, and the towers meet after every H of them.

Read `job.py` first: what a tower does, and what happens when they meet. `runner.py` makes a step by
programs for one device each, `calls.py` several in one call; `looped.py` makes many by one program.
Only `steps.ways` enters.
"""
