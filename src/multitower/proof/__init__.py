"""Do two runs have the same bits, and if not, where do they part?

Read `verification.py`.
"""
