"""How a job of towers is run: as one program (fast), or as single-device programs (same bits).

`engines`, `data` and `models` do not use each other. An engine knows a `Job` and nothing of what it
computes. Read `job.py` first, then `same_bits.py` and `reduction.py`; where towers meet,
`collectives.py`, `rounds.py` and `exchanges.py`.
"""
